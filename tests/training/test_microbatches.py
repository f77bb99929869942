"""The share that each rank cuts for itself, against all shares dealt by hand."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from shoal.training.microbatches import Dealing, microbatches


def all_shares(ids: Sequence[int], size: int, even: bool, all_run: bool, ranks: int) -> list[list[Sequence[int]]]:
    """The microbatches of every rank."""
    things: Sequence[object] = ids if even else microbatches(ids, size)
    each, more = divmod(len(things), ranks)
    parts, start = [], 0
    for rank in range(ranks):
        end = start + each + (rank < more)
        parts.append(list(things[start:end]))
        start = end
    if not even:
        return parts
    return [microbatches(part, size) or [[]] * all_run for part in parts]


@given(st.integers(0, 30), st.integers(1, 9), st.booleans(), st.booleans(), st.integers(1, 9), st.data())
def test_a_rank_cuts_its_share_without_the_others(samples, size, even, all_run, ranks, data):
    all_run = all_run and even
    ids = [7 * each for each in range(samples)]
    first = data.draw(st.integers(0, ranks - 1))
    partners = range(first, data.draw(st.integers(first + 1, ranks)))
    shares = all_shares(ids, size, even, all_run, ranks)
    for rank in partners:
        found = Dealing(size, even, all_run, rank, ranks, partners).cut(ids)
        assert found.microbatches == shares[rank]
        assert found.after == sum(len(shares[other]) for other in partners if other > rank)
        assert found.most == len(shares[first]) == max(len(shares[other]) for other in partners)
        assert found.samples == sum(len(each) for other in partners for each in shares[other])
