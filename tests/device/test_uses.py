"""What an engine does beside the rows of steps, on the simulated accelerator: as on the CPU, and nothing unordered."""

from __future__ import annotations

from functools import cache, partial

import pytest

from tests.device import uses
from tests.device.simulator import simulate_ranks, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

ON_ONE_AND_TWO = ("evaluation", "generation", "plans_in_turn", "there_and_back", "streamed")
ON_ONE_AND_TWO += ("without_a_fused_kernel", "not_finite", "door")
ALGORITHMS = (
    {"name": "bf16"},
    {"name": "delayed"},
    {"name": "none"},
    {"name": "qadam", "warmup": 2},
    {"name": "onebit_adam", "warmup": 2},
    {"name": "streaming_diloco", "every": 4, "fragments": 2, "overlap": 1},
)
CASES = {f"{name}-{size}": (getattr(uses, name), size) for name in ON_ONE_AND_TWO for size in (1, 2)}
CASES |= {f"masters-{keep}": (partial(uses.masters, keep), 2) for keep in ("split", "kahan", "stochastic")}
CASES |= {schedule: (partial(uses.both_ways, schedule), 2) for schedule in ("interleaved", "zbv")}
CASES |= {options["name"]: (partial(uses.exchanged, options), 2) for options in ALGORITHMS}
MODES = ("lazy", 1)


@cache
def on_the_cpu(name: str) -> list[list[float]]:
    use, size = CASES[name]
    return [run.result for run in simulate_ranks(uses.used, size, "cpu", use, timeout=120)]


@pytest.mark.parametrize("mode", [MODES[0], pytest.param(MODES[1], marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", CASES)
def test_a_use_is_as_on_the_cpu(name, mode):
    use, size = CASES[name]
    runs = simulate_ranks(uses.used, size, "cuda", use, mode=mode, patience=60, timeout=120)
    assert [run.trace.defects for run in runs] == [[]] * size
    for run, reference in zip(runs, on_the_cpu(name), strict=True):
        assert run.result == pytest.approx(reference, rel=1e-3, abs=1e-4)
