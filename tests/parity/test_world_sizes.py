"""A plan goes on with any number of ranks: 64 of 64 sizes at a constant global batch, dealt out without processes, and
a few of them in ranks, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal import Plan
from shoal.data import Cursor
from shoal.mesh import Mesh
from shoal.planner.dry_run import dry_run
from shoal.planner.prepare import Subject
from shoal.precision import precision
from shoal.training.microbatches import Dealing, choose_microbatch, microbatches
from tests.parity.cases import CASES, engine
from tests.parity.covering import thinned
from tests.pool import reference, run_ranks

SIZES = range(1, 65)
PLANS: dict[str, dict[str, Any]] = {
    "dp": {},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "hybrid": {"dp": 8, "zero": 2, "shard": 4},
    "tp": {"tp": 4},
    "cp": {"cp": 2, "context": "ring"},
    "pp": {"pp": 4},
    "experts": {"dp": 4, "ep": 4},
    "all": {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "zero": 1},
}
SAMPLES, GLOBAL_BATCH = 421, 48  # the last batch of an epoch has 37: fewer than there are ranks, and a prime
COUNTS = torch.randint(0, 9, (SAMPLES,), generator=torch.Generator().manual_seed(1))
VALUES = torch.rand(SAMPLES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def dealt(plan: Plan, microbatch: int | None) -> list[Dealing]:
    """What deals samples to each replica; the other ranks of a replica's model have the same."""
    meshes = [Mesh(plan, rank, plan.size) for rank in range(plan.size)]
    replicas = {mesh.rank("dp") for mesh in meshes}
    assert replicas == set(range(plan.dp))
    assert all(sum(mesh.rank("dp") == each for mesh in meshes) == plan.size // plan.dp for each in replicas)
    size = choose_microbatch(microbatch, GLOBAL_BATCH, plan, torch.nn.Linear(1, 1), False)
    return [Dealing(size, microbatch is None, False, rank, plan.dp, range(plan.dp)) for rank in range(plan.dp)]


def sums(ids: Any) -> tuple[float, int]:
    """The sum of a loss over what counts in a microbatch, and how much counts."""
    return float((VALUES[ids] * COUNTS[ids]).sum()), int(COUNTS[ids].sum())


@pytest.mark.fast
@pytest.mark.parametrize("microbatch", [None, 1, 4])
@pytest.mark.parametrize("name", PLANS)
def test_every_size_trains_on_the_same_samples(name, microbatch):
    """The ranks' shares are the batch, in its order; of a fixed microbatch, they are whole microbatches of the one cut
    that one process makes; and the sums over ranks give the batch's mean."""
    given, order = Plan(**PLANS[name]), Cursor(SAMPLES, GLOBAL_BATCH, seed=5)
    for size in SIZES:
        plan = given.fitted(size)
        assert plan.size == size and (plan.zero, plan.context) == (given.zero, given.context)
        deal = dealt(plan, microbatch)
        for step in (0, order.steps_per_epoch - 1):
            ids = order.ids(step).tolist()
            shares = [each.cut(ids) for each in deal]
            runs = [run for share in shares for run in share.microbatches]
            assert [sample for run in runs for sample in run] == ids
            assert microbatch is None or runs == microbatches(ids, microbatch)
            numbers = [len(share.microbatches) for share in shares]
            assert [share.after for share in shares] == [sum(numbers[rank + 1 :]) for rank in range(plan.dp)]
            assert {(share.most, share.samples) for share in shares} == {(max(numbers), len(ids))}
            assert max(numbers) - min(numbers) <= 1, "as even as can be"
            total = [sum(part) for part in zip(*(sums(run) for run in runs), strict=True)]
            whole = sums(ids)
            assert total[1] == whole[1] and total[0] / total[1] == pytest.approx(whole[0] / whole[1], rel=1e-12)


def test_the_nearest_degrees_are_taken():
    """Degrees beside dp stay where they divide the ranks, and else become the divisors that do with most ranks."""
    found = {size: Plan(tp=4, pp=2).fitted(size) for size in (1, 2, 3, 4, 6, 8, 12, 24)}
    assert {size: (plan.pp, plan.dp, plan.tp) for size, plan in found.items()} == {
        1: (1, 1, 1),
        2: (1, 1, 2),
        3: (1, 3, 1),
        4: (1, 1, 4),
        6: (1, 3, 2),
        8: (2, 1, 4),
        12: (1, 3, 4),
        24: (2, 3, 4),
    }
    assert [Plan(dp=4, ep=4).fitted(size).ep for size in (3, 6, 8, 12)] == [1, 2, 4, 4]


DRY = {"tp": "gpt", "pp": "gpt-deep", "cp": "gpt", "experts": "moe", "all": "moe-deep"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.matrix) for name in DRY])
def test_the_model_can_be_cut_for_every_size(name):
    """First and last rank of all degrees that come up run a microbatch of their part of the model, on fake tensors."""
    case = CASES[DRY[name]]
    plans = {(plan.tp, plan.cp, plan.pp, plan.ep): plan for plan in map(Plan(**PLANS[name]).fitted, SIZES)}
    assert len(plans) > 1
    for plan in plans.values():
        for rank in {0, plan.size - 1}:
            made = Subject(case.factory, case.loss, case.data()[0], 1, precision("fp32"), plan, rank=rank)
            assert dry_run(made).events


# ---- in ranks

STEPS = 5  # the fourth has 5 samples, the fifth is another epoch's
REAL = {
    "dp": ({}, "gpt"),
    "zero1": ({"zero": 1}, "gpt"),
    "zero2": ({"zero": 2}, "gpt"),
    "zero3": ({"zero": 3}, "gpt"),
    "tp": ({"tp": 4}, "gpt"),
    "pp": ({"pp": 2}, "gpt"),
    "experts": ({"dp": 4, "ep": 4, "zero": 2}, "moe"),
}
ROWS = [(name, size) for name in REAL for size in (1, 2, 3, 4, 5, 6, 7, 11)]
COVERING = [("zero1", 2), ("tp", 3), ("experts", 4), ("zero2", 7)]


def losses(world: Any, case: str, fields: dict[str, Any]) -> list[float]:
    plan = Plan(**fields).fitted(world.size)
    running = engine(case, "fp32", 3, world=world, plan=plan)
    found = [running.step(batch).loss for batch in running.batches(CASES[case].data(), steps=STEPS)]
    found.append(running.evaluate(CASES[case].data()).loss)
    running.close()
    return found


@pytest.mark.parametrize(("name", "size"), thinned(ROWS, COVERING))
def test_ranks_of_any_number_train_as_one(name, size):
    """Where they are many, some have no sample in a step: the microbatch has one, and the short batch five."""
    fields, case = REAL[name]
    (expected,) = reference(losses, 1, case, {})
    for found in run_ranks(losses, size, case, fields):
        assert found == pytest.approx(expected, rel=1e-5)


# ---- beside DeepSpeed


def deepspeed_sizes(batch: int, micro_batches: list[int]) -> list[int]:
    """The numbers of GPUs that DeepSpeed's elasticity (version 0.1) takes at a global batch: batch = micro batch x
    accumulation steps x GPUs, all of them whole, for one of the micro batches that it is given.

    https://www.deepspeed.ai/docs/config-json/#elastic-training-config-v01-and-v02
    """
    return [gpus for gpus in SIZES if any(batch % (micro * gpus) == 0 for micro in micro_batches)]


@pytest.mark.fast
@pytest.mark.parametrize(("micro_batches", "most"), [([2, 4, 6], 22), ([8, 12, 16, 17], 19), ([1, 2, 4, 8], 24)])
def test_deepspeed_takes_a_third_of_the_sizes(micro_batches, most):
    """At whichever batch up to 2,000, its default, has the most; its own choice is among fewer batches. The first two
    rows are its default micro batches and those of its own tests."""
    counts = [len(deepspeed_sizes(batch, micro_batches)) for batch in range(1, 2001)]
    assert max(counts) == most < len(SIZES)
