"""How long passes take in virtual time, where a copy costs a tick of the clock a byte and each block is computed with
for a given time.

link      | 0 | 1 |     | 2 |
compute       | 0   |   | 1 | 2 ...       stalled: where the computation waits for the link
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.executors import FetchAndRelease, OnDemand
from shoal.chunks.executor import Executor
from tests.chunks.test_executor import Pass, passes
from tests.chunks.virtual import Machine

MANY = 300
SIZE = 4


def time_of(
    kind: type[Executor], trace: Pass, sizes: list[int], capacity: int, compute: list[int], ahead: int = 1
) -> Machine:
    """The machine after a pass that repeats another one, at time 0 of its own."""
    machine = Machine(sizes, capacity)
    executor = kind(machine.blocks, machine, machine.tier, ahead)
    machine.run(executor, trace, compute)
    machine.now, machine.free_at, machine.copied = 0, 0, 0
    machine.run(executor, trace, compute)
    return machine


def there_and_back(blocks: int, microbatches: int = 1) -> Pass:
    """Forward and backward over layers of one block each; the same block twice in a row is one tick."""
    order = [*range(blocks), *reversed(range(blocks))] * microbatches
    return tuple(frozenset({block}) for block, before in zip(order, [-1, *order], strict=False) if block != before)


def test_by_hand():
    """Two blocks fit of three; a copy takes 4, a computation 5: block 1 comes from 4 to 8, while 0 is computed with
    until 9, and so on. On the way back 0 alone comes anew, while 1 is in use."""
    trace = there_and_back(3)
    ours = time_of(Executor, trace, [SIZE] * 3, 2 * SIZE, [5] * 5)
    assert (ours.now, ours.stalled, ours.copied) == (4 + 5 * 5, 4, 4 * SIZE)
    lru = time_of(OnDemand, trace, [SIZE] * 3, 2 * SIZE, [5] * 5)
    assert (lru.now, lru.stalled, lru.copied) == (4 * 4 + 5 * 5, 4 * 4, 4 * SIZE)


@given(st.integers(2, 8), st.data())
def test_where_computing_takes_as_long_as_copying_only_the_first_block_is_waited_for(blocks, data):
    """With room for two blocks or more, one on its way at a time."""
    trace = there_and_back(blocks, data.draw(st.integers(1, 3)))
    capacity = SIZE * data.draw(st.integers(2, blocks))
    compute = [SIZE + data.draw(st.integers(0, 3)) for _ in trace]
    ours = time_of(Executor, trace, [SIZE] * blocks, capacity, compute)
    assert ours.stalled == SIZE and ours.now == SIZE + sum(compute)
    lru = time_of(OnDemand, trace, [SIZE] * blocks, capacity, compute)
    assert lru.stalled == lru.copied > SIZE


@settings(max_examples=MANY)
@given(passes(), st.integers(1, 3), st.data())
def test_fetching_early_never_takes_longer(case, ahead, data):
    """Of any trace: the time lies between that of the busier of link and computation, and that of one after the other,
    as it is without fetching early."""
    trace, sizes, capacity = case
    compute = [data.draw(st.integers(0, 9)) for _ in trace]
    early, late = (time_of(Executor, trace, sizes, capacity, compute, number) for number in (ahead, 0))
    assert late.now == late.copied + sum(compute)
    assert max(early.copied, sum(compute)) <= early.now <= late.now


@settings(max_examples=MANY)
@given(passes(), st.data())
def test_blocks_of_one_size_take_no_longer_than_with_recency(case, data):
    """Of any trace."""
    trace, sizes, _ = case
    sizes = [SIZE] * len(sizes)
    capacity = SIZE * data.draw(st.integers(2, 6))
    compute = [data.draw(st.integers(0, 9)) for _ in trace]
    ours, lru = (time_of(kind, trace, sizes, capacity, compute) for kind in (Executor, OnDemand))
    assert ours.now <= lru.now and ours.copied <= lru.copied


@settings(max_examples=MANY)
@given(passes(), st.data())
def test_where_the_link_limits_fetch_and_release_takes_longer(case, data):
    """Of any trace of blocks of one size, where no computation takes more than half of a copy."""
    trace, sizes, _ = case
    sizes = [SIZE] * len(sizes)
    capacity = SIZE * data.draw(st.integers(2, 6))
    compute = [data.draw(st.integers(0, SIZE // 2)) for _ in trace]
    ours, theirs = (time_of(kind, trace, sizes, capacity, compute) for kind in (Executor, FetchAndRelease))
    assert ours.copied <= theirs.copied and ours.now <= theirs.now


def test_where_computing_limits_what_is_kept_may_take_the_room_of_what_comes():
    """The plan moves fewest bytes, not least time: block 0 is kept, so 2 cannot come before 1 has gone. No order of a
    training step (below)."""
    trace = tuple(frozenset({block}) for block in (0, 1, 2, 0))
    ours, theirs = (time_of(kind, trace, [SIZE] * 3, 2 * SIZE, [5] * 4) for kind in (Executor, FetchAndRelease))
    assert (ours.copied, ours.now) == (3 * SIZE, 2 * 4 + 4 * 5)
    assert (theirs.copied, theirs.now) == (4 * SIZE, 4 + 4 * 5)


@settings(max_examples=MANY)
@given(st.integers(2, 8), st.data())
def test_a_training_step_takes_no_longer_than_with_fetch_and_release(blocks, data):
    """Whatever limits, forward and backward over blocks of one size."""
    trace = there_and_back(blocks, data.draw(st.integers(1, 3)))
    capacity = SIZE * data.draw(st.integers(2, blocks + 1))
    compute = [data.draw(st.integers(0, 9)) for _ in trace]
    ours, theirs = (time_of(kind, trace, [SIZE] * blocks, capacity, compute) for kind in (Executor, FetchAndRelease))
    assert ours.now <= theirs.now
