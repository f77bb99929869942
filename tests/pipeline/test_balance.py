"""Cuts of blocks into stages against all there are."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import UserError
from shoal.pipeline import balance

pytestmark = pytest.mark.fast


def all_cuts(blocks: int, stages: int) -> list[list[range]]:
    return [
        [range(a, b) for a, b in pairwise([0, *inner, blocks])] for inner in combinations(range(1, blocks), stages - 1)
    ]


@settings(max_examples=150, deadline=None)
@given(
    st.data(),
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.integers(0, 20),
    st.integers(0, 20),
    st.booleans(),
)
def test_no_cut_is_better(data, costs, first, last, limited):
    stages = data.draw(st.integers(1, len(costs)))
    sizes = [data.draw(st.integers(1, 5)) for _ in costs] if limited else None
    kept = [data.draw(st.integers(0, 3)) for _ in costs] if limited else None
    under_way = [data.draw(st.integers(1, 4)) for _ in range(stages)]
    limit = data.draw(st.integers(3, 30)) if limited else float("inf")

    def seconds(cut: list[range]) -> list[float]:
        found = [float(sum(costs[block] for block in part)) for part in cut]
        found[0] += first
        found[-1] += last
        return found

    fitting = [
        cut
        for cut in all_cuts(len(costs), stages)
        if sizes is None
        or kept is None
        or all(
            sum(sizes[block] + each * kept[block] for block in part) <= limit
            for part, each in zip(cut, under_way, strict=True)
        )
    ]
    if not fitting:
        with pytest.raises(UserError, match="no cut into"):
            balance(costs, stages, first, last, sizes, kept, under_way, limit)
        return
    found = balance(costs, stages, first, last, sizes, kept, under_way, limit)
    assert found in fitting
    assert max(seconds(found)) == min(max(seconds(cut)) for cut in fitting)


def test_embedding_and_head_count():
    assert balance([1.0] * 8, 4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert balance([1.0] * 8, 4, first=0.5, last=2.0) == [range(2), range(2, 4), range(4, 7), range(7, 8)]


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(UserError, match=r"^plan\.pp: a model of 2 blocks has no 3 stages: take at most 2"):
        balance([1.0, 1.0], 3)
