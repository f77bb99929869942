"""Hundreds and thousands of real supervisors over emulated links: how long they take to agree on a new generation, and
how many messages one of them sends and gets for it."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from tests.elastic.simulated import Change, change


def found(members: int, fanout: int = 64) -> Change:
    change_of = change(members, fanout)
    print(json.dumps({"members": members, "fanout": fanout, **asdict(change_of)}))
    return change_of


def test_a_tree_takes_no_longer_than_its_levels_and_spares_its_middle():
    """Fan-out 8: 24 members are two levels, 192 are three. A star of 192 has all messages at its middle, 3 for each."""
    small, large, star = found(24, 8), found(192, 8), found(192, 1000)
    assert (small.direct, small.relays) == (8, 1) and (large.direct, large.relays) == (8, 2)
    assert (star.direct, star.relays) == (190, 0)
    assert large.seconds < small.seconds + 0.03  # a level more: some ms up and down, three times
    assert star.most > 3 * 190 > 1.4 * large.most
    assert large.mean < 2 * small.mean


@pytest.mark.matrix
@pytest.mark.parametrize("members, relays", [(1024, 1), (4096, 1), (16384, 2)])
def test_thousands_agree_in_a_moment(members, relays):
    agreed = found(members)
    assert (agreed.direct, agreed.relays) == (64, relays)
    assert agreed.seconds < 0.1 and agreed.most < 1500 and agreed.mean < 10
