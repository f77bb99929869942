"""The engine on the simulated accelerator: rows of the parity matrix equal the CPU's, and nothing in them is unordered.

Every row runs under the most hostile schedule and one of the others, which take turns; `make matrix` runs all of them.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest

from shoal import Plan
from tests.device import engines
from tests.device.simulator import LAZY_EAGER_AND_SEEDS, simulate_ranks, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

STEPS = 2
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "one": ("gpt", "fp32", {}),
    "fp16": ("gpt", "fp16", {}),
    "bf16": ("gpt", "bf16", {}),
    "dropout": ("gpt-rotary-dropout", "fp32", {}),
    "batchnorm": ("resnet-batchnorm", "fp32", {}),
    "recompute": ("gpt", "fp32", {"recompute": "full"}),
    "memory": ("gpt", "fp32", {"memory": {}}),
    "memory-deferred": ("gpt", "fp32", {"memory": {"update": "deferred", "activations": 0.5}}),
    "memory-disk": ("gpt", "fp32", {"memory": {"disk": ""}}),
    "dp2": ("gpt", "fp32", {"dp": 2}),
    "dp2-zero1": ("gpt", "fp32", {"dp": 2, "zero": 1}),
    "dp2-zero2": ("gpt", "bf16", {"dp": 2, "zero": 2}),
    "dp2-zero3": ("gpt", "fp32", {"dp": 2, "zero": 3}),
    "dp2-memory-zero3": ("gpt", "fp32", {"dp": 2, "zero": 3, "memory": {}}),
    "tp2": ("gpt", "fp32", {"tp": 2}),
    "cp2": ("gpt", "fp32", {"cp": 2}),
    "ep2": ("moe", "fp32", {"dp": 2, "ep": 2}),
    "pp2": ("gpt", "fp32", {"pp": 2}),
    "pp2-zb1p": ("gpt-deep", "fp32", {"pp": 2, "schedule": "zb1p"}),
    "pp2-2bw": ("llama", "fp32", {"pp": 2, "schedule": "2bw"}),
    "dp4-hybrid": ("gpt", "fp32", {"dp": 4, "zero": 2, "shard": 2}),
    "ring2": ("gpt", "fp32", {"cp": 2, "context": "ring"}),
    "tp2-memory": ("gpt", "fp32", {"tp": 2, "memory": {}}),
    "pp2-memory": ("gpt", "fp32", {"pp": 2, "memory": {"activations": 0.5}}),
    "dp2-tp2-zero1": ("gpt", "fp32", {"dp": 2, "tp": 2, "zero": 1}),
    "pp2-dp2": ("gpt", "fp32", {"pp": 2, "dp": 2}),
}
EXCHANGES = ("bytegrad", "decentralized", "diloco", "local_sgd", "powersgd", "topk", "adasum", "async_average")
EXCHANGES += ("hierarchical", "low_precision_decentralized")
ROWS |= {name: ("gpt", "fp32", {"dp": 2, "exchange": name}) for name in EXCHANGES}
ROWS["dp2-buddies"] = ("gpt", "bf16", {"dp": 2, "zero": 3, "buddy": 1})
PRODUCTS = ("pp2-zb1p", "dp4-hybrid", "ring2", "tp2-memory", "pp2-memory", "dp2-tp2-zero1", "pp2-dp2", *EXCHANGES[3:])
PRODUCTS += ("dp2-buddies",)
"""Rows of mechanisms that others have too: for the matrix."""
NAMED_SIM = ("fp16", "memory", "dropout", "dp2-zero3", "pp2")
"""Rows that run on a device of that name, too, outside the matrix."""
CLOSE = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 2e-2}
"""The largest difference of losses, norms and weights: attention and AdamW have other kernels there."""
ROUNDS = {
    "bytegrad": 1e-3,
    "low_precision_decentralized": 1e-3,
}  # to 8 bits, where a difference of the last one is large
DOCUMENTED = {"training/result.py": 1}  # a step's sums and norm, read while the next one runs
"""Waits of the host in each step that nobody reads, by file; of two steps between those at whose weights is looked (the
forwards 1, 2, 4, 8, ... of an engine: training/intact, chunks/written)."""
MORE = {"memory": {"optim/optimizer.py": 2}}


def modes(name: str) -> list[Any]:
    """Lazy, one of the others, and the rest for the matrix."""
    turn = LAZY_EAGER_AND_SEEDS[1 + list(ROWS).index(name) % (len(LAZY_EAGER_AND_SEEDS) - 1)]
    now = () if name in PRODUCTS else ("lazy",) if name in EXCHANGES else ("lazy", turn)
    return [pytest.param(name, mode, marks=() if mode in now else pytest.mark.matrix) for mode in LAZY_EAGER_AND_SEEDS]


def ranks(plan: dict[str, Any]) -> int:
    return Plan(**{**plan, "memory": None}).size


@cache
def on_the_cpu(name: str) -> list[Any]:
    case, precision, plan = ROWS[name]
    return [run.result for run in simulate_ranks(engines.trained, ranks(plan), "cpu", case, precision, plan, STEPS)]


@pytest.mark.parametrize(("name", "mode"), [row for name in ROWS for row in modes(name)])
def test_a_row_equals_the_cpus(name, mode):
    case, precision, plan = ROWS[name]
    runs = simulate_ranks(
        engines.trained, ranks(plan), "cuda", case, precision, plan, STEPS, mode=mode, patience=60, timeout=120
    )
    assert [run.trace.defects for run in runs] == [[]] * len(runs)
    references = on_the_cpu(name)
    alike = [reference.losses == references[0].losses for reference in references]
    assert [run.result.losses == runs[0].result.losses for run in runs] == alike, (
        "on every rank the same, or each its own"
    )
    for run, reference in zip(runs, references, strict=True):
        assert engines.difference(run.result, reference) < ROUNDS.get(name, CLOSE[precision])


@pytest.mark.parametrize(
    "name", [*NAMED_SIM, *(pytest.param(name, marks=pytest.mark.matrix) for name in ROWS if name not in NAMED_SIM)]
)
def test_a_device_of_another_name_serves_as_well(name):
    """Its ranks meet over the process group that torch registers for it."""
    case, precision, plan = ROWS[name]
    runs = simulate_ranks(
        engines.trained, ranks(plan), "sim", case, precision, plan, STEPS, name="sim", patience=60, timeout=120
    )
    assert [run.trace.defects for run in runs] == [[]] * len(runs)
    for run, reference in zip(runs, on_the_cpu(name), strict=True):
        assert engines.difference(run.result, reference) < ROUNDS.get(name, CLOSE[precision])


@pytest.mark.parametrize("name", ["one", "memory", "dp2", "dp2-zero3", "tp2", "cp2", "pp2"])
def test_the_host_waits_no_more_often_than_documented(name):
    plan = ROWS[name][2]
    few, many = (simulate_ranks(engines.steps_alone, ranks(plan), "cuda", plan, steps)[0].trace for steps in (12, 14))
    found: Counter[str] = Counter()
    for wait, times in (many.waits - few.waits).items():
        found[wait.where.rpartition("/shoal/")[2].partition(":")[0]] += times
    allowed = {place: 2 * times for place, times in (DOCUMENTED | MORE.get(name, {})).items()}
    assert not found - Counter(allowed), "waits that are not documented"


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize("name", ["one", "memory"])
def test_a_checkpoint_goes_to_the_device_and_back(name, mode):
    (run,) = simulate_ranks(engines.there_and_back, 1, "cuda", ROWS[name][2], mode=mode)
    stayed, went = run.result
    assert run.trace.defects == [] and went == pytest.approx(stayed, rel=1e-6)


def test_a_plan_with_memory_moves_what_it_must_and_takes_less():
    """The weights come and go, and masters and state are on the host, though nothing limits what is on the device."""
    whole, offloaded = (
        simulate_ranks(engines.trained, 1, "cuda", *ROWS[name], STEPS)[0].trace for name in ("one", "memory")
    )
    assert offloaded.peak[0] < whole.peak[0] * 2 / 3
    assert offloaded.copied["host to device"] > whole.copied["host to device"]
