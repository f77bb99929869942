"""What an engine does beside the rows of steps, on the simulated accelerator: as on the CPU, and nothing unordered."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.device import adapters, uses
from tests.device.alike import check_as_on_the_cpu
from tests.device.simulator import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

ON_ONE_AND_TWO = ("evaluation", "generation", "plans_in_turn", "there_and_back", "streamed")
ON_ONE_AND_TWO += ("without_a_fused_kernel", "not_finite")
ALGORITHMS = (
    {"name": "bf16"},
    {"name": "delayed"},
    {"name": "none"},
    {"name": "qadam", "warmup": 2},
    {"name": "onebit_adam", "warmup": 2},
    {"name": "streaming_diloco", "every": 4, "fragments": 2, "overlap": 1},
)
ADAM = {"type": "Adam", "params": {"lr": 1e-2}}
ON_HOST = {"device": "cpu"}
ALL_ON_HOST = {"stage": 3, "offload_optimizer": ON_HOST, "offload_param": ON_HOST}
STAGES: tuple[dict[str, Any], ...] = ({"stage": 1}, ALL_ON_HOST)
DEEPSPEED = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "optimizer": ADAM}
HOOKED: tuple[dict[str, Any], ...] = (
    {"name": "allreduce"},
    {"name": "bytegrad"},
    {"name": "topk", "ratio": 0.25},
    {"name": "powersgd", "start": 1, "min_compression": 1.0},
)
CASES = {f"{name}-{size}": (getattr(uses, name), size) for name in ON_ONE_AND_TWO for size in (1, 2)}
CASES |= {f"masters-{keep}": (partial(uses.masters, keep), 2) for keep in ("split", "kahan", "stochastic")}
CASES |= {schedule: (partial(uses.both_ways, schedule), 2) for schedule in ("interleaved", "zbv")}
CASES |= {options["name"]: (partial(uses.exchanged, options), 2) for options in ALGORITHMS}
CASES |= {f"patrickstar-{size}": (partial(uses.door, {"optimizer": ADAM}), size) for size in (1, 2)}
CASES |= {
    f"deepspeed-{zero['stage']}": (partial(uses.door, {**DEEPSPEED, "zero_optimization": zero}), 2) for zero in STAGES
}
CASES |= {f"overflow-zero{zero}": (partial(uses.overflow, {"dp": 2, "zero": zero}), 2) for zero in range(4)}
CASES |= {f"ddp-{each['name']}": (partial(adapters.ddp_hook, each), 2) for each in HOOKED}
CASES |= {f"fsdp2-{name}": (partial(adapters.fsdp2, name), 2) for name in ("bf16", "bytegrad")}
CASES |= {
    "2bw": (partial(uses.unflushed, {"pp": 2}), 2),
    "2bw-dp": (partial(uses.unflushed, {"pp": 2, "dp": 2}), 4),
    "2bw-left": (partial(uses.left_unflushed, "2bw"), 2),
    "pipedream-left": (partial(uses.left_unflushed, "pipedream"), 2),
}
CASES["2bw-diverges"] = (uses.unflushed_that_diverges, 2)
CASES["ddp-scaled"] = (partial(adapters.scaled_ddp_hook, HOOKED[2]), 2)
MODES = ("lazy", "eager", 1)
ALIKE = ("overflow-zero1", "overflow-zero2", "ddp-allreduce", "ddp-bytegrad", "ddp-topk", "fsdp2-bf16", "deepspeed-1")
ALIKE += ("2bw", "pipedream-left", "evaluation-1", "generation-1", "plans_in_turn-1", "there_and_back-1")
"""Cases of mechanisms that others have too: for the matrix."""
RUNS = [
    pytest.param(name, mode, marks=() if mode == MODES[0] and name not in ALIKE else pytest.mark.matrix)
    for name in CASES
    for mode in MODES
]


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_a_use_is_as_on_the_cpu(name, mode):
    check_as_on_the_cpu(*CASES[name], mode)
