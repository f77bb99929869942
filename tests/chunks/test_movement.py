"""Plans of moves against their invariants and against brute force."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.chunks.movement import fetched, fetched_and_released, fetched_by_recency, plan
from shoal.errors import BudgetExceeded


@st.composite
def traces(draw, largest: int = 9) -> tuple[tuple[frozenset[int], ...], list[int], list[int]]:
    """A trace over a few blocks, their sizes, and room for each tick that is enough."""
    blocks = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, largest), min_size=blocks, max_size=blocks))
    uses = st.frozensets(st.integers(0, blocks - 1), min_size=1, max_size=2)
    trace = tuple(draw(st.lists(uses, min_size=1, max_size=14)))
    spare = draw(st.lists(st.integers(0, 3 * largest), min_size=len(trace), max_size=len(trace)))
    return trace, sizes, [sum(sizes[block] for block in used) + more for used, more in zip(trace, spare, strict=True)]


@given(traces(), st.integers(0, 3))
def test_a_plan_brings_what_is_used_and_never_holds_too_much(case, ahead):
    trace, sizes, room = case
    moves = plan(trace, sizes, room, ahead)
    here: set[int] = set()
    for tick, used in enumerate(trace):
        assert set(moves[tick].release) <= here, "only what is there goes"
        here -= set(moves[tick].release)
        assert not here & set(moves[tick].fetch), "nothing comes twice"
        here |= set(moves[tick].fetch)
        assert used <= here
        assert sum(sizes[block] for block in here) <= room[tick]


@given(traces())
def test_fetching_early_moves_no_byte_more(case):
    trace, sizes, room = case
    assert fetched(plan(trace, sizes, room, 3), sizes) <= fetched(plan(trace, sizes, room, 0), sizes)


@given(traces(largest=1), st.integers(0, 3))
def test_no_rule_moves_less_where_blocks_are_alike(case, ahead):
    trace, sizes, room = case
    room = [max(room)] * len(trace)
    moved = fetched(plan(trace, sizes, room, ahead), sizes)
    assert moved <= fetched_by_recency(trace, sizes, room)
    assert moved <= fetched_and_released(trace, sizes)
    assert moved == fewest(trace, room[0])


def fewest(trace: tuple[frozenset[int], ...], room: int) -> int:
    """The fewest blocks that can come in, by trying all ways."""

    @cache
    def rest(tick: int, here: frozenset[int]) -> int:
        if tick == len(trace):
            return 0
        come = len(trace[tick] - here)
        held = here | trace[tick]
        return come + min(rest(tick + 1, kept) for kept in smaller(held, trace[tick], room))

    return rest(0, frozenset())


def smaller(held: frozenset[int], used: frozenset[int], room: int) -> list[frozenset[int]]:
    """The ways to bring `held` down to `room` without losing what is used."""
    if len(held) <= room:
        return [held]
    return [kept for block in held - used for kept in smaller(held - {block}, used, room)]


def test_the_next_comes_while_the_one_before_is_in_use():
    """Three blocks there and back with room for two: each but the first comes one tick early, and those of the turning
    point stay."""
    trace = tuple(frozenset({block}) for block in (0, 1, 2, 2, 1, 0))
    moves = plan(trace, [1, 1, 1], 2)
    assert [tick.fetch for tick in moves] == [(0, 1), (2,), (), (), (0,), ()]
    assert [tick.release for tick in moves] == [(), (0,), (), (), (2,), (1,)]


def test_a_budget_that_is_too_small_says_what_would_do():
    with pytest.raises(BudgetExceeded, match="7 bytes are needed, the budget is 6") as failure:
        plan((frozenset({0}), frozenset({0, 1})), [3, 4], 6)
    assert failure.value.needed == 7
