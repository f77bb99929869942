"""The order of samples: every id once an epoch, a pure function of (seed, step)."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import Cursor
from shoal.data.cursor import ROUNDS, permute
from shoal.data.keyed import derive_key
from shoal.errors import UserError

MASK = (1 << 64) - 1
GOLDEN = [[3, 0], [2, 1], [4], [3, 2], [1, 0], [4]]  # of 5 samples, 2 a step, seed 3


def epoch_ids(cursor: Cursor, epoch: int) -> list[int]:
    first = epoch * cursor.steps_per_epoch
    return [i for step in range(first, first + cursor.steps_per_epoch) for i in cursor.ids(step).tolist()]


def scalar_hash(value: int, key: int) -> int:
    x = (value + key) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def scalar_permute(position: int, size: int, key: tuple) -> int:
    """The same permutation one number at a time, in Python's unbounded integers."""
    rows = math.isqrt(size - 1) + 1
    columns = math.ceil(size / rows)
    while True:
        row, column = divmod(position, columns)
        for r in range(ROUNDS):
            row = (row + scalar_hash(column, derive_key(*key, "row", r)) % rows) % rows
            column = (column + scalar_hash(row, derive_key(*key, "column", r)) % columns) % columns
        position = row * columns + column
        if position < size:
            return position


@pytest.mark.fast
def test_sizes_and_epochs_of_a_small_case():
    cursor = Cursor(samples=5, global_batch=2, seed=0)  # 5 = 2 + 2 + 1
    assert cursor.steps_per_epoch == 3
    assert [len(cursor.ids(step)) for step in range(6)] == [2, 2, 1, 2, 2, 1]
    assert [cursor.epoch(step) for step in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert sorted(epoch_ids(cursor, 0)) == sorted(epoch_ids(cursor, 1)) == [0, 1, 2, 3, 4]
    assert cursor.ids(0).dtype == np.int64


@pytest.mark.fast
def test_the_order_never_changes():
    """Checkpoints hold a step, not an order: another order would make a resumed run skip and repeat samples."""
    cursor = Cursor(samples=5, global_batch=2, seed=3)
    assert [cursor.ids(step).tolist() for step in range(6)] == GOLDEN


@pytest.mark.fast
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 10**12])
def test_permutation_equals_one_number_at_a_time(size):
    positions = np.unique(np.linspace(0, size - 1, 20).astype(np.uint64))
    expected = [scalar_permute(int(p), size, ("key", 3)) for p in positions]
    assert permute(positions, size, ("key", 3)).tolist() == expected


@pytest.mark.fast
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(1, 50), st.integers(-(2**70), 2**70), st.integers(0, 5))
def test_every_id_once_an_epoch(samples, global_batch, seed, epoch):
    assert sorted(epoch_ids(Cursor(samples, global_batch, seed), epoch)) == list(range(samples))


@pytest.mark.fast
def test_global_batch_only_cuts_the_order():
    assert epoch_ids(Cursor(100, 7, seed=1), 2) == epoch_ids(Cursor(100, 100, seed=1), 2)


@pytest.mark.fast
def test_a_step_far_in_a_huge_dataset_costs_its_batch_only():
    ids = Cursor(samples=10**15, global_batch=4, seed=0).ids(10**13)
    assert len(set(ids.tolist())) == 4
    assert ids.max() < 10**15


@pytest.mark.fast
def test_epochs_and_seeds_have_their_own_order():
    cursor = Cursor(1000, 1000, seed=0)
    orders = [cursor.ids(0), cursor.ids(1), Cursor(1000, 1000, seed=1).ids(0), np.arange(1000)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).mean() < 0.02  # a random pair agrees in one place of a thousand


@pytest.mark.parametrize("samples", [3, 6, 10])
def test_places_and_neighbours_are_uniform(samples):
    """Over many epochs each id comes first equally often, and each ordered pair comes first equally often."""
    epochs = 3000
    pairs = np.zeros((samples, samples))
    for epoch in range(epochs):
        first, second = permute(np.arange(2, dtype=np.uint64), samples, ("test", epoch))
        pairs[first, second] += 1
    singles, expected = pairs.sum(axis=1), epochs / samples
    # chi-square, 5 sigma
    assert (((singles - expected) ** 2) / expected).sum() < samples - 1 + 5 * math.sqrt(2 * (samples - 1))
    distinct = pairs[~np.eye(samples, dtype=bool)]
    expected = epochs / len(distinct)
    assert (((distinct - expected) ** 2) / expected).sum() < len(distinct) - 1 + 5 * math.sqrt(2 * (len(distinct) - 1))


@pytest.mark.fast
@pytest.mark.parametrize(("samples", "global_batch", "says"), [(0, 1, "no samples"), (1, 0, "global_batch is 0")])
def test_refuses(samples, global_batch, says):
    with pytest.raises(UserError, match=says):
        Cursor(samples, global_batch, seed=0)
