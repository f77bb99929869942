"""An elastic sampler: every sample once an epoch, however often the number of replicas changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shoal.data import BalancedCursor, Cursor, ElasticSampler
from shoal.errors import UserError

pytestmark = pytest.mark.fast


def group(order: Cursor | BalancedCursor, replicas: int, state: dict | None = None) -> list[ElasticSampler]:
    found = [ElasticSampler(order, replicas, rank) for rank in range(replicas)]
    for sampler in found if state else ():
        sampler.load_state_dict(state)
    return found


def together(samplers: list[ElasticSampler], steps: int) -> list[list[int]]:
    """The samples that count in each of `steps` steps, in the order of the replicas."""
    batches, found = [iter(sampler) for sampler in samplers], []
    for _ in range(steps):
        parts = [(next(mine), sampler.weight) for mine, sampler in zip(batches, samplers, strict=True)]
        found.append([sample for part, weight in parts for sample in part if weight])
        for sampler in samplers:
            sampler.record()
    return found


def test_a_small_case_by_hand():
    order = Cursor(7, global_batch=5, seed=0)
    whole = [order.ids(step).tolist() for step in range(2)]
    first, second, third = group(order, 3)
    assert list(first) == [whole[0][:2], whole[1][:1]] and list(second) == [whole[0][2:4], whole[1][1:]]
    assert list(third) == [whole[0][4:], whole[1][:1]], "without a sample: the first one, which does not count"
    assert [each.weight for each in (first, second, third)] == [1.2, 1.2, 0.6]
    for each in (first, second, third):
        each.record()
    assert [each.weight for each in (first, second, third)] == [1.5, 1.5, 0.0]
    assert list(third) == [whole[1][:1]] and len(third) == 1


@given(st.integers(1, 200), st.integers(1, 64), st.lists(st.tuples(st.integers(1, 64), st.integers(0, 9)), max_size=6))
def test_every_sample_comes_once_whatever_happens(samples, global_batch, changes):
    order = Cursor(samples, global_batch, seed=3)
    state, found = ElasticSampler(order).state_dict(), list[list[int]]()
    for replicas, steps in [*changes, (1, order.steps_per_epoch)]:
        samplers = group(order, replicas, state)
        found += together(samplers, min(steps, len(samplers[0])))
        (state,) = {tuple(sampler.state_dict().items()): sampler.state_dict() for sampler in samplers}.values()
    assert found == [order.ids(step).tolist() for step in range(order.steps_per_epoch)]


@pytest.mark.parametrize("replicas", range(1, 65))
def test_the_weighted_mean_of_the_replicas_is_that_of_the_batch(replicas):
    values = torch.rand(101, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    order = Cursor(101, global_batch=48, seed=1)
    for step in range(order.steps_per_epoch):
        samplers = group(order, replicas, {**ElasticSampler(order).state_dict(), "step": step})
        means = [values[next(iter(sampler))].mean() * sampler.weight for sampler in samplers]
        assert float(sum(means)) / replicas == pytest.approx(float(values[order.ids(step)].mean()), rel=1e-12)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_runs_ahead_loses_nothing(workers):
    """Batches that a loader has fetched, and that were not recorded, come again."""
    dataset = torch.arange(40)
    order = BalancedCursor(dataset.numpy() % 7, global_batch=8, seed=2)
    sampler = ElasticSampler(order, 2, 1)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
    seen = []
    for batch in loader:
        if len(seen) == 2:
            break
        seen.append(batch.tolist())
        sampler.record()
    sampler.resize(4, 3)
    seen += [batch.tolist() for batch in loader]
    whole = [order.ids(step).tolist() for step in range(5)]
    assert seen == [batch[4:] for batch in whole[:2]] + [batch[6:] for batch in whole[2:]]


def test_epochs():
    sampler = ElasticSampler(Cursor(10, 4, seed=0), 2, 0)
    first = list(sampler)
    sampler.record(2)
    sampler.set_epoch(0)
    assert list(sampler) == first[2:], "the epoch under way goes on"
    sampler.record()
    assert list(sampler) == [] and len(sampler) == 0
    with pytest.raises(UserError, match=r"record\(1\): 0 global batches of epoch 0 are left"):
        sampler.record()
    sampler.set_epoch(1)
    assert len(list(sampler)) == 3 and list(sampler) != first


def test_an_iteration_does_not_outlive_a_change():
    sampler = ElasticSampler(Cursor(10, 2, seed=0), 2, 0)
    for change in (lambda: sampler.resize(1, 0), lambda: sampler.set_epoch(3)):
        batches = iter(sampler)
        next(batches)
        sampler.load_state_dict(sampler.state_dict())
        next(batches)
        change()
        with pytest.raises(UserError, match="iterate the loader again"):
            next(batches)


def test_what_does_not_fit_is_refused():
    order = Cursor(10, 2, seed=0)
    with pytest.raises(UserError, match="rank is 2 of 2 replicas"):
        ElasticSampler(order, 2, 2)
    state = ElasticSampler(order).state_dict()
    for name, other in (("samples", Cursor(11, 2, 0)), ("global_batch", Cursor(10, 3, 0)), ("seed", Cursor(10, 2, 1))):
        with pytest.raises(UserError, match=f"the sampler's {name} is"):
            ElasticSampler(other).load_state_dict(state)
    costs = [float(cost) for cost in range(10)]
    balanced = ElasticSampler(BalancedCursor(costs, 2, seed=0)).state_dict()
    ElasticSampler(BalancedCursor(costs, 2, seed=0)).load_state_dict(balanced)
    for other in (order, BalancedCursor(costs[::-1], 2, seed=0), BalancedCursor(costs, 2, seed=0, random_level=0.5)):
        with pytest.raises(UserError, match=r"the sampler's order is .*, and was BalancedCursor at level 0.0 of costs"):
            ElasticSampler(other).load_state_dict(balanced)
