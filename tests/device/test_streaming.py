"""Updates of masters on the host that go through the simulated accelerator, by measured rates: as on the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.device import budgets, streaming
from tests.device.alike import check_as_on_the_cpu
from tests.device.simulator import simulate_ranks, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

CASES = {
    "one-microbatch": (streaming.one_microbatch, 1),
    "one-microbatch-dp": (streaming.one_microbatch, 2),
    "clipped": (streaming.clipped_by_value, 1),
    "clipped-zero3": (streaming.clipped_by_value, 2),
    "saved": (streaming.saved_and_under_other_plans, 1),
    "saved-zero3": (streaming.saved_and_under_other_plans, 2),
    "frozen": (partial(streaming.frozen, {"memory": {"chunk": "16KiB"}}), 1),
    "frozen-zero3": (partial(streaming.frozen, {"dp": 2, "zero": 3, "memory": {"chunk": "16KiB"}}), 2),
    "frozen-stages": (partial(streaming.frozen, {"pp": 2, "memory": {"chunk": "16KiB"}}), 2),
    "scaled": (partial(streaming.scaled, True), 1),
    "scaled-zero3": (partial(streaming.scaled, True), 2),
    "scaled-stays": (partial(streaming.scaled, False), 1),
    "stays": (partial(streaming.staying, "whole", streaming.ADAMW), 1),
    "stays-zero3": (partial(streaming.staying, "split", streaming.ADAMW), 2),
    "stays-kahan": (partial(streaming.staying, "kahan", streaming.ADAMW), 1),
    "stays-stochastic": (partial(streaming.staying, "stochastic", streaming.NADAM), 1),
    "stages": (streaming.stages, 2),
    "one-stage": (streaming.one_stage_with_fp32, 2),
    "activations": (streaming.activations_of_short_microbatches, 1),
    "sparse": (partial(streaming.sparse_rows, False), 1),
    "sparse-streamed": (partial(streaming.sparse_rows, True), 1),
    "buddies": (streaming.kept_by_a_buddy, 2),
    "adagrad-at-once": (partial(streaming.on_the_host_at_once, partial(torch.optim.Adagrad, lr=0.01)), 1),
    "amsgrad-at-once": (
        partial(streaming.on_the_host_at_once, partial(torch.optim.Adam, lr=3e-3, amsgrad=True)),
        2,
    ),
}
MODES = ("lazy", "eager", 1)
ALIKE = ("one-microbatch-dp", "clipped-zero3", "frozen-zero3", "stays-zero3", "frozen-stages")
"""Cases on several ranks of which there is one on one rank, and others on several: for the matrix."""
RUNS = [
    pytest.param(name, mode, marks=() if mode == MODES[0] and name not in ALIKE else pytest.mark.matrix)
    for name in CASES
    for mode in MODES
]


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_a_use_is_as_on_the_cpu(name, mode):
    check_as_on_the_cpu(*CASES[name], mode)


@pytest.mark.parametrize(("faster", "microbatch"), [(True, 12), (True, 3), (False, 12), (False, 3)])
def test_a_step_stays_within_the_budget_that_a_refusal_asks_for(faster, microbatch):
    (run,) = simulate_ranks(streaming.needed, 1, "cuda", faster, microbatch)
    (free,) = simulate_ranks(streaming.taken, 1, "cuda", 1 << 30, faster, microbatch)
    least = run.result
    for device in (least, (2 * least + free.result[1]) // 3, (least + 2 * free.result[1]) // 3):
        (run,) = simulate_ranks(streaming.taken, 1, "cuda", device, faster, microbatch)
        assert run.trace.defects == []
        assert run.result[0] == pytest.approx(free.result[0], rel=1e-3)
        assert run.result[1] <= device + budgets.RESULT


def test_masters_of_all_chunks_are_not_on_the_device_while_an_engine_is_made():
    (run,) = simulate_ranks(streaming.begun, 1, "cuda")
    most, masters_and_state = run.result
    assert 0 < most < masters_and_state / 3
