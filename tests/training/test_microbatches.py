"""The share that each rank cuts for itself, against all shares dealt by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise, product
from operator import truediv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import Plan, UserError
from shoal.data.cursor import share_starts
from shoal.training.microbatches import Dealing, largest_share, microbatches


def dealt(number: int, shares: Sequence[float]) -> list[int]:
    """How many of `number` things each rank has: one by one to the rank that then has least for its share."""
    each = [0] * len(shares)
    for _ in range(number):
        each[
            min(
                (rank for rank, share in enumerate(shares) if share),
                key=lambda rank: (Fraction(each[rank] + 1) / Fraction(shares[rank]), rank),
            )
        ] += 1
    return each


def all_shares(
    ids: Sequence[int], size: int, even: bool, all_run: bool, shares: Sequence[float]
) -> list[list[Sequence[int]]]:
    """The microbatches of every rank."""
    things: Sequence[object] = ids if even else microbatches(ids, size)
    parts, start = [], 0
    for number in dealt(len(things), shares):
        parts.append(list(things[start : start + number]))
        start += number
    if not even:
        return parts
    return [microbatches(part, size) or [[]] * all_run for part in parts]


SHARES = st.lists(st.sampled_from([1, 2, 3, 7, 0.1, 0.25, 1 / 3, 5.5, 0]), min_size=1, max_size=9).filter(any)


@given(st.integers(0, 30), st.integers(1, 9), st.booleans(), st.booleans(), SHARES, st.booleans(), st.data())
def test_a_rank_cuts_its_share_without_the_others(samples, size, even, all_run, given_shares, alike, data):
    all_run, ranks = all_run and even, len(given_shares)
    ids = [7 * each for each in range(samples)]
    first = data.draw(st.integers(0, ranks - 1))
    partners = range(first, data.draw(st.integers(first + 1, ranks)))
    shares = all_shares(ids, size, even, all_run, [1] * ranks if alike else given_shares)
    for rank in partners:
        some = () if alike else tuple(given_shares)
        found = Dealing(size, even, all_run, rank, ranks, partners, shares=some).cut(ids)
        assert found.microbatches == shares[rank]
        assert found.after == sum(len(shares[other]) for other in partners if other > rank)
        assert found.most == max(len(shares[other]) for other in partners)
        assert found.alike is (len({len(shares[other]) for other in partners}) == 1)
        assert found.samples == sum(len(each) for other in partners for each in shares[other])


@given(st.integers(0, 9), st.lists(st.sampled_from([1, 2, 3.5, 0.3]), min_size=1, max_size=4))
def test_no_way_to_deal_is_faster(number, shares):
    """The rank that takes longest takes as little as it does in the best of all ways."""
    ways = (each for each in product(range(number + 1), repeat=len(shares)) if sum(each) == number)
    best = min(max(have / share for have, share in zip(each, shares, strict=True)) for each in ways)
    starts = share_starts(number, tuple(shares))
    found = [end - start for start, end in pairwise(starts)]
    assert sum(found) == number and max(map(truediv, found, shares)) == pytest.approx(best)


@pytest.mark.parametrize("shares", ["31", [3], [0, 0], [3, -1], [3, True], [3, math.inf], 3], ids=str)
def test_what_is_no_share_is_refused(shares):
    with pytest.raises(UserError, match=r"plan\.shares"):
        Plan(dp=2, shares=shares)


def test_shares_follow_the_ranks():
    plan = Plan(dp=2, tp=2, shares=[3, 1])
    assert Plan.from_dict(plan.to_dict()) == plan and plan.shares == (3, 1)
    assert plan.changed({"zero": 1}, 4).shares == (3, 1) == plan.fitted(4).shares
    assert plan.fitted(8).shares == () == plan.changed({"tp": 1}, 4).shares
    assert largest_share(9, plan) == 7 and largest_share(9, Plan(dp=2)) == 5
