"""The executor with any trace, sizes, room and neighbours in its tier: what must hold at every moment (see virtual)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.chunks.executor import Executor
from shoal.chunks.movement import fetched, plan
from shoal.errors import BudgetExceeded
from tests.chunks.test_movement import traces
from tests.chunks.virtual import Machine

MANY = 300
"""Examples: each takes about a millisecond."""
Pass = tuple[frozenset[int], ...]


def neighbours(draw, trace: Pass, sizes: list[int], capacity: int) -> list[int]:
    """What others take at each tick, and until the next one has begun, so that what both need fits."""
    needed = [sum(sizes[block] for block in used) for used in trace]
    return [draw(st.integers(0, capacity - max(pair))) for pair in zip(needed, [*needed[1:], 0], strict=True)]


@st.composite
def passes(draw) -> tuple[Pass, list[int], int]:
    """A trace in which no two ticks in a row are alike, the blocks' sizes, and a capacity that does."""
    trace, sizes, _ = draw(traces())
    trace = tuple(used for used, before in zip(trace, (None, *trace), strict=False) if used != before)
    needed = max(sum(sizes[block] for block in used) for used in trace)
    return trace, sizes, needed + draw(st.integers(0, 20))


@settings(max_examples=MANY)
@given(passes(), st.integers(0, 3), st.integers(0, 9), st.data())
def test_a_pass_that_repeats_moves_what_was_planned(case, ahead, compute, data):
    """The machine checks states, blocks in use and the ledger all the while."""
    trace, sizes, capacity = case
    others = neighbours(data.draw, trace, sizes, capacity)
    machine = Machine(sizes, capacity)
    executor = Executor(machine.blocks, machine, machine.tier, ahead)
    seconds = [compute] * len(trace)
    machine.run(executor, trace, seconds, others)
    room = [capacity - max(before, now) for before, now in zip([0, *others], others, strict=False)]
    for _ in range(2):
        before = executor.bytes_in
        machine.run(executor, trace, seconds, others)
        assert executor.bytes_in - before == fetched(plan(trace, sizes, room, ahead), sizes)
    assert machine.tier.most_in_all <= capacity
    assert machine.tier.used == 0


@settings(max_examples=MANY)
@given(passes(), st.integers(0, 3), st.data())
def test_what_is_used_beyond_the_plan_and_is_in_memory_moves_nothing(case, ahead, data):
    """Ranks that gather blocks together need not use each as often, see `saved`."""
    trace, sizes, capacity = case
    machine = Machine(sizes, capacity)
    executor = Executor(machine.blocks, machine, machine.tier, ahead)
    machine.run(executor, trace, [1] * len(trace))
    before = executor.bytes_in
    machine.run(executor, trace, [1] * len(trace))
    moved, before = executor.bytes_in - before, executor.bytes_in
    executor.begin("pass")
    for used in trace:
        machine.in_use = used
        executor.use(used)
        there = [place for place, block in enumerate(machine.blocks) if block.state == "there"]
        machine.in_use = data.draw(st.frozensets(st.sampled_from(there))) if there else frozenset()
        executor.use(machine.in_use)
    machine.in_use = frozenset()
    executor.end()
    assert executor.bytes_in - before == moved
    assert executor.followed is not None


@settings(max_examples=MANY)
@given(passes(), st.integers(0, 3), st.data())
def test_a_pass_that_is_another_one_or_has_other_neighbours_goes_on(case, ahead, data):
    """Whatever was recorded before, a pass that fits on demand runs."""
    trace, sizes, capacity = case
    machine = Machine(sizes, capacity)
    executor = Executor(machine.blocks, machine, machine.tier, ahead)
    for _ in range(3):
        part = trace[: data.draw(st.integers(0, len(trace)))] or trace
        machine.run(executor, part, [1] * len(part), neighbours(data.draw, part, sizes, capacity))
    assert machine.tier.most_in_all <= capacity


@settings(max_examples=MANY)
@given(traces(), st.data())
def test_a_pass_that_was_cut_short_leaves_nothing(case, data):
    trace, sizes, _ = case
    machine = Machine(sizes)
    executor = Executor(machine.blocks, machine, machine.tier)
    machine.run(executor, trace, [3] * len(trace))
    executor.begin("pass")
    for used in trace[: data.draw(st.integers(0, len(trace)))]:
        executor.use(used)
    executor.forget()
    assert all(block.state == "none" for block in machine.blocks)
    machine.run(executor, trace, [3] * len(trace))


@settings(max_examples=MANY)
@given(traces(), st.data())
def test_too_small_a_tier_is_refused_with_the_smallest_that_would_do(case, data):
    trace, sizes, _ = case
    needed = max(sum(sizes[block] for block in used) for used in trace)
    machine = Machine(sizes, data.draw(st.integers(0, needed - 1)))
    executor = Executor(machine.blocks, machine, machine.tier)
    with pytest.raises(BudgetExceeded) as refusal:
        executor.begin("pass")
        for used in trace:
            executor.use(used)
        executor.end()
    assert refusal.value.needed == needed
