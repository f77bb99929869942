"""Hundreds and thousands of real supervisors over emulated links: how long they take to agree on a new generation, and
how many messages one of them sends and gets for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import pytest

from shoal.elastic import relay, supervisor
from shoal.elastic.events import Limits
from tests.elastic.cluster import Member
from tests.elastic.simulated import Net, simulated


@dataclass(frozen=True)
class Change:
    """seconds: from the death of the last node until all others have new places. most, mean: messages of a node
    meanwhile, sent and got."""

    seconds: float
    most: int
    mean: float


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def change(monkeypatch: pytest.MonkeyPatch, members: int, fanout: int = 64) -> Change:
    monkeypatch.setattr(supervisor, "_LOOK", 0.01)
    monkeypatch.setattr(relay, "FANOUT", fanout)

    async def main(net: Net) -> Change:
        first = Member("n0").lead(Limits(minimum=members, settle=0.0))
        nodes = [first]
        for number in range(1, members):
            nodes.append(Member(f"n{number}").join(first))
            if number % 16 == 0:
                await asyncio.sleep(0.05)  # else all knock before there is a relay
        await until(lambda: all(each.runs is not None for each in nodes))
        first.at._coordinator.machine.limits = Limits(minimum=1, settle=0.0)
        before, began, left = +net.messages, net.now(), nodes[:-1]
        await nodes[-1].die()
        await until(lambda: all(each.runs is not None and each.runs.nodes == members - 1 for each in left))
        assert {each.runs.first for each in left} == set(range(members - 1))
        spent = {node: count - before[node] for node, count in net.messages.items() if node > 0}
        found = Change(net.now() - began, max(spent.values()), sum(spent.values()) / members)
        print(json.dumps({"members": members, "fanout": fanout, **asdict(found)}))
        return found

    return simulated(monkeypatch, main)


def test_a_tree_takes_no_longer_than_its_levels_and_spares_its_middle(monkeypatch):
    """Fan-out 8: 24 members are two levels, 192 are three. A star of 192 has all messages at its middle, 3 for each."""
    small, large, star = change(monkeypatch, 24, 8), change(monkeypatch, 192, 8), change(monkeypatch, 192, 1000)
    assert large.seconds < small.seconds + 0.03  # a level more: some ms up and down, three times
    assert star.most > 3 * 190 > 1.4 * large.most
    assert large.mean < 2 * small.mean


@pytest.mark.matrix
@pytest.mark.parametrize("members", [1024, 4096])
def test_thousands_agree_in_a_moment(monkeypatch, members):
    found = change(monkeypatch, members)
    assert found.seconds < 0.1 and found.most < members and found.mean < 5
