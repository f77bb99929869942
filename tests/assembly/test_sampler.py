"""A loop of the caller's over a torch DataLoader, on ranks that change, trains as one process does on whole batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from shoal import Plan, UserError
from shoal.comm.world import Seat, World
from shoal.data import ElasticSampler
from shoal.engine import Engine
from shoal.errors import LaunchError
from shoal.models import MLP, regression
from tests.assembly.test_regroup import again, die, weights
from tests.parity.cases import ADAMW, vectors
from tests.pool import disposable_ranks, reference, run_ranks

EPOCHS, GLOBAL_BATCH, DIES = 2, 10, 3  # five steps an epoch, the last one of a single sample
DATA = vectors()


def made(world: World, plan: Plan, **more: Any) -> Engine:
    return Engine(partial(MLP, (10, 16, 3)), regression, ADAMW, plan, global_batch=GLOBAL_BATCH, world=world, **more)


def train(engine: Engine, sampler: ElasticSampler, seen: list[Any], fails: int = -1) -> None:
    """Trains to the end, from wherever `sampler` is; `seen`: the samples of this rank by step."""
    loop = engine.loop()
    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for batch in DataLoader(DATA, batch_sampler=sampler):
            loss = F.mse_loss(loop(batch["inputs"]), batch["targets"]) * sampler.weight
            if engine.step_index == fails:
                if engine.world.rank == 0:
                    die()
                raise LaunchError("as if another rank had gone")
            loop.backward(loss)
            loop.step()
            seen.append((engine.step_index, sampler.weight))
            sampler.record()


def _alone(world: World) -> Any:
    engine = made(world, Plan())
    train(engine, engine.sampler(DATA), [])
    return weights(engine)


def _killed(world: World, joins: bool) -> Any:
    """Rank 0 of three dies; the others go on, or a fourth one comes in its place."""
    left = [1, 2, 3] if joins else [1, 2]
    seen = list[Any]()
    if world.rank == 3:
        engine = made(again(world, 2, 3), Plan(dp=3), joins=True)
        train(engine, engine.sampler(DATA), seen)
        return weights(engine), seen
    engine = made(World(world.rank, 3, seat=Seat(world.rank, 3), store=world._given), Plan(dp=3))
    sampler = engine.sampler(DATA)
    with pytest.raises(LaunchError):
        train(engine, sampler, seen, DIES)
    engine.regroup(Plan(dp=len(left)), again(world, left.index(world.rank), 3) if joins else engine.world.without([0]))
    assert (sampler.replicas, sampler.rank) == (len(left), left.index(world.rank))
    train(engine, sampler, seen)
    return weights(engine), seen


def assert_same(found: dict[str, torch.Tensor]) -> None:
    for name, value in reference(_alone, 1)[0].items():
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("joins", [False, True])
def test_ranks_that_are_left_go_on_with_the_next_samples(joins):
    with disposable_ranks(_killed, 4 if joins else 3, joins) as ranks:
        answers = [rank.result(timeout=60) for rank in ranks[1:]]
    for found, seen in answers:
        assert_same(found)
        assert [step for step, _ in seen] == list(range(10 - len(seen) + 1, 11)), "each step once"
    assert {len(seen) for _, seen in answers} == ({10, 10 - DIES} if joins else {10})
    parts = 3 if joins else 2
    for step in range(-(10 - DIES), 0):
        assert sum(seen[step][1] for _, seen in answers) == pytest.approx(parts)


def _other_plans(world: World) -> Any:
    """Four replicas, then four that share one copy of the state, then two of them."""
    engine = made(world, Plan(dp=4))
    sampler, seen = engine.sampler(DATA), list[Any]()
    assert (sampler.replicas, sampler.rank) == (4, world.rank)
    loop = engine.loop()
    for batch, _ in zip(DataLoader(DATA, batch_sampler=sampler), range(2), strict=False):
        loop.backward(F.mse_loss(loop(batch["inputs"]), batch["targets"]) * sampler.weight)
        loop.step()
        sampler.record()
    batches = iter(sampler)
    next(batches)
    engine.replan(Plan(dp=4, zero=3))
    with pytest.raises(UserError, match="iterate the loader again"):
        next(batches)
    left = engine.world.among([1, 2])
    if left is None:
        engine.leave()
        return None
    engine.replan(Plan(dp=2, shares=(3, 1)), world=left)
    assert (sampler.replicas, sampler.rank, sampler.step) == (2, world.rank - 1, 2)
    train(engine, sampler, seen)
    return weights(engine)


def test_another_plan_goes_on_with_the_next_samples():
    answers = run_ranks(_other_plans, 4)
    assert answers[0] is None and answers[3] is None
    for found in answers[1:3]:
        assert_same(found)
