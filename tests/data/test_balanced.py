"""Batches of similar cost: every sample once an epoch, near-equal cuts, a pure function of (costs, seed, step)."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shoal.data import Cursor
from shoal.data.balanced import (
    BalancedCursor,
    LoadBalancedBatchSampler,
    LoadBalancedSampler,
    balanced_order,
    sample_costs,
)
from shoal.errors import UserError

costs_lists = st.lists(st.integers(0, 1000), min_size=1, max_size=120)
GOLDEN = [[3, 4], [1, 0], [2], [0, 2], [3, 4], [1]]  # of 5 samples, 2 a step, seed 3
lengths = np.random.default_rng(0).lognormal(5, 1, size=2048)  # as of documents: a few are very long


def epoch_ids(cursor: BalancedCursor, epoch: int) -> list[list[int]]:
    first = epoch * cursor.steps_per_epoch
    return [cursor.ids(step).tolist() for step in range(first, first + cursor.steps_per_epoch)]


def imbalance(cursor: BalancedCursor | Cursor, ranks: int) -> float:
    """Mean over steps of what the slowest rank works, over the mean of the ranks."""
    work = [lengths[cursor.ids(step)].reshape(ranks, -1).sum(axis=1) for step in range(cursor.steps_per_epoch)]
    return float(np.mean([ranks.max() / ranks.mean() for ranks in work]))


@pytest.mark.fast
def test_a_small_case_by_hand():
    cursor = BalancedCursor(np.array([50, 10, 60, 20, 40, 30]), global_batch=2, seed=0)  # sorted: 1 3 | 5 4 | 0 2
    for epoch in range(3):
        assert sorted(map(tuple, epoch_ids(cursor, epoch))) == [(0, 2), (1, 3), (5, 4)]
    assert len({tuple(map(tuple, epoch_ids(cursor, epoch))) for epoch in range(20)}) == 6  # all orders of three batches


@pytest.mark.fast
@pytest.mark.parametrize(
    ("costs", "order"),
    [
        ([7], [0]),
        ([2, 1], [1, 0]),
        ([1, 2, 3, 4], [0, 3, 1, 2]),
        ([1, 2, 3, 4, 5, 6], [0, 5, 2, 3, 1, 4]),
        ([1, 5, 9], [0, 2, 1]),
        ([9, 1, 5], [1, 0, 2]),  # ids follow the costs: 1 + 9, then 5
    ],
)
def test_order_within_a_batch_by_hand(costs, order):
    assert balanced_order(np.array(costs, float)).tolist() == order


@pytest.mark.fast
@given(costs_lists)
def test_aligned_blocks_cost_the_same_up_to_one_sample(costs):
    values = np.array(costs, float)
    order = balanced_order(values)
    assert sorted(order.tolist()) == list(range(len(costs)))
    for size in (1, 2, 4, 8, 16, 32, 64):
        blocks = values[order][: len(costs) // size * size].reshape(-1, size).sum(axis=1)
        assert not len(blocks) or np.ptp(blocks) <= np.ptp(values)


@pytest.mark.fast
@given(costs_lists, st.integers(1, 40), st.integers(0, 2**70), st.integers(0, 5), st.sampled_from([0.0, 0.3, 1.0]))
def test_every_id_once_an_epoch_and_the_short_batch_last(costs, global_batch, seed, epoch, level):
    cursor = BalancedCursor(np.array(costs), global_batch, seed, level)
    batches = epoch_ids(cursor, epoch)
    assert sorted(i for batch in batches for i in batch) == list(range(len(costs)))
    assert [len(batch) for batch in batches[:-1]] == [global_batch] * (len(batches) - 1)
    assert cursor.epoch(epoch * len(batches)) == epoch


@pytest.mark.fast
@given(costs_lists, st.integers(1, 40), st.integers(0, 2**70))
def test_without_noise_batches_hold_neighbours(costs, global_batch, seed):
    batches = epoch_ids(BalancedCursor(np.array(costs), global_batch, seed), 0)
    ranges = sorted((min(costs[i] for i in batch), max(costs[i] for i in batch)) for batch in batches)
    assert all(one[1] <= other[0] for one, other in pairwise(ranges))


@pytest.mark.fast
@given(costs_lists, st.integers(1, 9), st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_a_step_does_not_depend_on_what_was_asked_before(costs, global_batch, steps):
    one = BalancedCursor(np.array(costs), global_batch, 5, 0.2)
    for step in steps:
        assert one.ids(step).tolist() == BalancedCursor(np.array(costs), global_batch, 5, 0.2).ids(step).tolist()


@pytest.mark.fast
def test_the_order_never_changes():
    """Checkpoints hold a step, not an order."""
    cursor = BalancedCursor(np.array([50, 10, 60, 20, 40]), global_batch=2, seed=3, random_level=0.5)
    assert [cursor.ids(step).tolist() for step in range(6)] == GOLDEN


@pytest.mark.fast
def test_noise_and_ties_change_who_meets_whom():
    def meetings(costs, level):
        cursor = BalancedCursor(costs, 4, 0, level)
        return len({frozenset(batch) for epoch in range(5) for batch in epoch_ids(cursor, epoch)})

    distinct, equal = np.arange(64), np.ones(64)
    assert meetings(distinct, 0.0) == 16
    assert meetings(distinct, 0.3) > 60
    assert meetings(equal, 0.0) > 60


@pytest.mark.fast
def test_a_rank_moves_no_further_than_the_level_allows():
    cursor = BalancedCursor(np.arange(1000), 1000, 0, random_level=0.1)
    places = np.argsort(cursor._order(0))
    assert 20 < np.abs(places - np.arange(1000)).max() <= 0.1 / 0.9 * 1000 + 1


@pytest.mark.fast
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_work_alike(ranks):
    random, balanced = (imbalance(cursor, ranks) for cursor in (Cursor(2048, 64, 0), BalancedCursor(lengths, 64, 0)))
    assert random > 1.1
    assert balanced < 1.01
    assert imbalance(BalancedCursor(lengths, 64, 0, 0.1), ranks) < (1 + random) / 2


@pytest.mark.fast
def test_the_short_batch_is_of_any_cost():
    cursor = BalancedCursor(np.arange(10), 4, seed=0)
    short = {tuple(sorted(epoch_ids(cursor, epoch)[-1])) for epoch in range(40)}
    assert short == {(0, 1), (4, 5), (8, 9)}


@pytest.mark.fast
@given(st.integers(1, 60), st.integers(1, 7), st.integers(0, 3))
def test_replicas_share_the_dataset(samples, replicas, epoch):
    dataset = [{"length": i * i % 17} for i in range(samples)]
    samplers = [LoadBalancedSampler(dataset, lambda item: item["length"], replicas, rank) for rank in range(replicas)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    drawn = [list(sampler) for sampler in samplers]
    assert {len(ids) for ids in drawn} == {len(samplers[0])} == {-(-samples // replicas)}
    assert {i for ids in drawn for i in ids} == set(range(samples))
    for position in list(zip(*drawn, strict=True))[:-1]:
        assert len(set(position)) == replicas


@pytest.mark.fast
def test_epochs_of_a_sampler_differ_and_no_rank_has_the_dear_ones():
    samplers = [LoadBalancedSampler(range(1000), np.arange(1000.0), 2, rank) for rank in range(2)]
    first = [list(sampler) for sampler in samplers]
    assert abs(sum(first[0]) - sum(first[1])) <= 2
    samplers[0].set_epoch(1)
    assert list(samplers[0]) != first[0]


@pytest.mark.fast
def test_batches_by_a_budget_are_equally_many():
    sizes = [1, 1, 1, 1, 9, 9, 9, 9, 5, 5]

    def within_ten(ids):
        batches: list[list[int]] = [[]]
        for i in ids:
            if sum(sizes[j] for j in batches[-1]) + sizes[i] > 10:
                batches.append([])
            batches[-1].append(i)
        return batches

    samplers = [
        LoadBalancedBatchSampler(LoadBalancedSampler(range(10), sizes, 2, rank), within_ten) for rank in range(2)
    ]
    drawn = [list(DataLoader(list(range(10)), batch_sampler=sampler, collate_fn=list)) for sampler in samplers]
    assert len(drawn[0]) == len(drawn[1]) == len(samplers[0]) == len(samplers[1])
    assert {i for batches in drawn for batch in batches for i in batch} == set(range(10))
    assert all(sum(sizes[i] for i in batch) <= 10 for batches in drawn for batch in batches)
    samplers[0].set_epoch(1)
    assert list(samplers[0]) != drawn[0]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: BalancedCursor(np.array([]), 1, 0), "at least one sample"),
        (lambda: BalancedCursor(np.array([[1.0]]), 1, 0), r"shape \(1, 1\)"),
        (lambda: BalancedCursor(np.array([1.0, np.nan]), 1, 0), "sample 1 is nan"),
        (lambda: BalancedCursor(np.array([1.0]), 0, 0), "global_batch is 0"),
        (lambda: BalancedCursor(np.array([1.0]), 1, 0, 1.5), "random_level is 1.5"),
        (lambda: BalancedCursor(np.array([1.0]), 1, 0).ids(-1), "step is -1"),
        (lambda: sample_costs([1, 2], [1.0]), "2 samples"),
        (lambda: LoadBalancedSampler([1, 2], [1.0, 2.0], 2, 2), "rank is 2 of 2"),
        (
            lambda: list(LoadBalancedBatchSampler(LoadBalancedSampler([1], [1.0], 1, 0), lambda ids: [])),
            "no batch for rank 0",
        ),
    ],
)
def test_refuses(make, says):
    with pytest.raises(UserError, match=says):
        make()
