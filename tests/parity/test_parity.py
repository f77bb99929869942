"""The parity matrix: every plan against one process, and one process against a plain torch loop."""

from __future__ import annotations

import copy
import math
from functools import cache
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from shoal import Plan
from shoal.data import Cursor, stack_samples
from shoal.optim.groups import decay_matrices_only
from shoal.precision import cast_floating
from shoal.training.loss import call_loss
from shoal.training.microbatches import microbatches
from tests.parity.cases import CASES, GLOBAL_BATCH, MESH_ONLY, SCHEDULE, Trace, engine, train
from tests.parity.covering import pairwise, thinned
from tests.pool import apart, run_ranks

STEPS = 8  # two epochs: the fourth and the eighth are short
LONG = 20  # the whole schedule
PLANS: dict[str, dict] = {
    "replicated": {},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "zero3-hosts": {
        "zero": 3
    },  # each rank as if on a host of its own: weights are gathered and let go; elsewhere all see one memory
    "hybrid": {"zero": 2, "shard": 2},
    "offload": {"memory": {}},  # how much the device may hold changes no bit: tests/parity/test_budgets.py
    "deferred": {"zero": 1, "memory": {"update": "deferred", "activations": 0.5}},
    "disk": {"zero": 3, "memory": {"disk": "a directory"}},
    "recompute": {"recompute": "full"},
    "selective": {"recompute": "selective", "zero": 1},
    "budget-hosts": {"recompute": {"name": "budget", "keep": 0.5}, "zero": 3},
    "shares": {"shares": [3, 1, 2, 0.5], "zero": 1},
    "shares-zero2": {"shares": [0, 4, 1, 0.1], "zero": 2},  # a rank without a microbatch
    "shares-hosts": {"shares": [3, 1, 2, 0.5], "zero": 3},
}
COLUMNS = (
    [case for case in CASES if case not in MESH_ONLY],
    [2, 3, 4],
    ["fp64", "fp32", "bf16", "fp16"],
    [1, 3],
    list(PLANS),
)


def goes_together(case: str, size: int, precision: str, accumulation: int, plan: str) -> bool:
    if case == "mixtral" and precision == "fp64":
        return False  # torch multiplies by groups of experts in at most fp32
    if precision == "fp16" and (size, accumulation) != (2, 3):
        return False  # slow on a CPU, and alike: what differs is in tests/precision
    if plan == "hybrid" and size != 4:
        return False  # copies of two ranks each
    if plan in ("deferred", "disk") and size != 2:
        return False  # what differs is within a rank
    if plan.endswith("hosts") and case == "unused-frozen":
        return False  # which layers run depends on the samples: ranks would gather different weights
    return not (PLANS[plan].get("recompute") and case in ("lstm", "unused-frozen"))  # nothing repeats in these


ROWS = [row for row in product(*COLUMNS) if goes_together(*row)]
MOST = ("gpt-rotary-dropout", "unused-frozen", "resnet-batchnorm")
"""The cases that differ most meet every plan in the covering array; the others all sizes, precisions and
accumulations."""
UNEVEN = {
    ("gpt-rotary-dropout", 4, "bf16", 1, "shares-hosts"),
    ("resnet-batchnorm", 2, "fp32", 3, "shares"),
    ("auxiliary", 3, "fp32", 3, "shares-zero2"),
    ("unused-frozen", 2, "fp64", 1, "shares-zero2"),
}
EVENLY = [row for row in ROWS if "shares" not in PLANS[row[4]]]
COVERING = UNEVEN | set(pairwise(EVENLY, lambda pair: (pair[0], pair[2]) != (0, 4) or pair[1] in MOST))
# Loss, gradient norm, and the step-1 gradient relative to its parameter's largest. bf16: a master that crosses a
# rounding
# boundary shows the forward another weight, by up to 2^-8 of it.
TOLERANCE = {
    "fp64": (1e-9, 1e-9, 1e-9),
    "fp32": (1e-6, 1e-5, 1e-5),
    "bf16": (2e-3, 2e-2, 1e-5),
    "fp16": (2e-3, 2e-2, 1e-4),
}
# A ReLU whose input is within rounding of zero may fall to the other side: no change of the loss, one pixel's part of
# the gradient.
WIDER = {("resnet-batchnorm", "fp32"): (1e-6, 1e-3, 1e-5)}


def options_of(plan: str, size: int) -> dict[str, Any]:
    """What a plan of `PLANS` gives `size` ranks: of its shares as many as there are ranks."""
    options = PLANS[plan]
    return {**options, "shares": options["shares"][:size]} if "shares" in options and size > 1 else options


def run(world, case: str, precision: str, accumulation: int, plan: str = "replicated") -> Trace:
    if plan.endswith("hosts"):
        world = apart(world)
    with TemporaryDirectory() as directory:
        options = options_of(plan, world.size) | ({"memory": {"disk": directory}} if plan == "disk" else {})
        running = engine(case, precision, accumulation, world=world, plan=Plan(dp=world.size, **options))
        try:
            return train(running, CASES[case].data(), STEPS)
        finally:
            running.close()


@cache
def one_process(case: str, precision: str, accumulation: int) -> Trace:
    return run_ranks(run, 1, case, precision, accumulation)[0]


@pytest.mark.parametrize(("case", "size", "precision", "accumulation", "plan"), thinned(ROWS, COVERING))
def test_ranks_equal_one_process(case, size, precision, accumulation, plan):
    reference = one_process(case, precision, accumulation)
    traces = run_ranks(run, size, case, precision, accumulation, plan)
    for trace in traces[1:]:
        assert trace.losses == traces[0].losses, "a result is the same on every rank"
        assert all(torch.equal(trace.weights[name], value) for name, value in traces[0].weights.items()), (
            "replicas are the same bits"
        )
        assert all(torch.equal(trace.seen[name], value) for name, value in traces[0].seen.items())
        assert all(torch.equal(trace.buffers[name], value) for name, value in traces[0].buffers.items())
    for name, value in traces[0].weights.items():
        assert torch.equal(traces[0].seen[name], value.to(traces[0].seen[name].dtype)), "the module sees the masters"
    compare(traces[0], reference, *WIDER.get((case, precision), TOLERANCE[precision]))


def compare(trace: Trace, reference: Trace, loss: float, norm: float, gradient: float) -> None:
    for name, value in reference.gradients.items():
        scale = float(value.abs().max())
        assert float((trace.gradients[name] - value).abs().max()) <= gradient * scale + 1e-12, (
            f"gradient of {name} at step 1"
        )
    assert trace.losses == pytest.approx(reference.losses, rel=loss)
    assert trace.norms == pytest.approx(reference.norms, rel=norm, nan_ok=True)  # NaN: skipped under loss scaling
    assert (trace.evaluation is None) == (reference.evaluation is None)
    if reference.evaluation is not None:
        assert trace.evaluation == pytest.approx(reference.evaluation, rel=max(loss, 1e-9) * 10)
    assert [list(aux) for aux in trace.aux] == [list(aux) for aux in reference.aux]
    for ours, theirs in zip(trace.aux, reference.aux, strict=True):
        assert ours == pytest.approx(theirs, rel=loss * 10)
    for name, value in reference.buffers.items():
        torch.testing.assert_close(trace.buffers[name], value, rtol=norm * 10, atol=norm * 10)


def plain(world, case: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """One process, plain torch, fp64, from the engine's initial weights: the mean over counts, clipped, AdamW or
    SGD."""
    running = engine(case, "fp64", 1, world=world)
    # a copy has none of the engine's hooks
    module, data, chosen = copy.deepcopy(running.module), CASES[case].data(), CASES[case]
    parameters = [p for p in module.parameters() if p.requires_grad]
    rule = decay_matrices_only(0.1)
    for parameter in parameters:
        parameter.grad_dtype = None
        parameter.grad = None
    optimizer = chosen.optimizer([{"params": [p], **rule("", p)} for p in parameters])
    scheduler, cursor, losses, norms = SCHEDULE(optimizer), Cursor(len(data), GLOBAL_BATCH, 0), [], []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        parts = []
        for ids in microbatches(cursor.ids(step).tolist(), 3):
            parts.append(
                call_loss(chosen.loss, module, cast_floating(stack_samples([data[i] for i in ids]), torch.float64))
            )
        count = sum(part.count for part in parts)
        mean = sum(part.total for part in parts) / count
        objective = mean + sum(value * part.count for part in parts for value in part.aux.values()) / count
        objective.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 0.8)))
        optimizer.step()
        scheduler.step()
        losses.append(float(mean))
    return losses, norms, {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.fast
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.plain])
def test_one_process_equals_a_plain_torch_loop(case):
    losses, norms, weights = run_ranks(plain, 1, case)[0]
    trace = one_process(case, "fp64", 1)
    rel = 1e-6 if case == "llama" else 1e-9  # its RMSNorm computes in fp32 whatever it is given
    assert trace.losses == pytest.approx(losses, rel=rel)
    assert trace.norms == pytest.approx(norms, rel=rel)
    for name, value in weights.items():
        torch.testing.assert_close(trace.weights[name], value, rtol=rel * 100, atol=rel)


def test_a_parameter_that_no_rank_touched_is_left_alone():
    trace, start = one_process("unused-frozen", "fp64", 1), run_ranks(initial, 1, "unused-frozen")[0]
    assert torch.equal(trace.weights["never.weight"], start["never.weight"]), "weight decay must not move it"
    assert not torch.equal(trace.weights["rare.weight"], start["rare.weight"])
    assert "frozen.weight" not in trace.weights


def initial(world, case: str) -> dict[str, torch.Tensor]:
    running = engine(case, "fp64", 1, world=world)
    return {name: value.detach().clone() for name, value in running.optimizer.parameters.items()}


def test_two_ranks_with_one_microbatch_each_are_bitwise_one_process():
    """Two summands have one order: the same bits, in fp32 too."""
    reference = run_ranks(two_microbatches, 1)[0]
    for trace in run_ranks(two_microbatches, 2):
        assert trace.losses == reference.losses
        assert all(torch.equal(trace.weights[name], value) for name, value in reference.weights.items())


def two_microbatches(world) -> Trace:
    running = engine("gpt", "fp32", 1, microbatch=6, clip=None, world=world)
    return train(running, CASES["gpt"].data()[:36], STEPS)


def whole_batches(world, case: str) -> Trace:
    """The whole schedule in one microbatch a step, which takes a quarter of the time."""
    running = engine(case, "fp32", 1, microbatch=GLOBAL_BATCH, world=world)
    trace = train(running, CASES[case].data(), LONG)
    running.close()
    return trace


@pytest.mark.matrix
def test_losses_fall():
    for case in CASES:
        losses = run_ranks(whole_batches, 1, case)[0].losses
        assert math.fsum(losses[-4:]) < math.fsum(losses[:4]), case
