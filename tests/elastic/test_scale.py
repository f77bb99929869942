"""Thousands of members in this process: what a change of the membership costs them and the coordinator."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace

import pytest

from shoal.elastic.events import Ended, Form, Joined, Left, Limits, Say, Stop, Tick
from shoal.elastic.journal import Journal
from shoal.elastic.membership import RUNNING, Membership
from shoal.elastic.records import encode

LINK = 100e-6  # seconds that a message is under way


@dataclass
class Cost:
    """What agreeing on a generation took: CPU `seconds` of the coordinator, messages and bytes of one member."""

    seconds: float
    messages: float
    largest: int


def change(machine: Membership, journal: Journal, leaver: str, now: float) -> Cost:
    """A member is lost; the others are told, say that their ranks have ended, and get their place in the next one."""
    sent, largest, began = 0, 0, time.process_time()
    number = machine.generation.number

    def tell(event) -> list:
        journal.append([event])
        return [each for each in machine.apply(event) if not isinstance(each, Say)]

    (stop,) = tell(Left(now, leaver, True, "its connection was refused"))
    assert isinstance(stop, Stop)
    others = list(machine.pending)
    for _ in others:
        largest, sent = max(largest, len(encode(stop))), sent + 1
    for name in others:
        decisions = tell(Ended(now + LINK, name, number, "lost", 0, 7, "it lost a peer", 1, True))
        sent += 1
    (form,) = decisions
    assert isinstance(form, Form) and form.generation.number == number + 1
    for place in form.generation.places:
        largest, sent = max(largest, len(encode(replace(place)))), sent + 1
    return Cost(time.process_time() - began, sent / len(others), largest)


def measure(members: int) -> Cost:
    machine, journal = Membership(Limits()), Journal()
    for number in range(members):
        machine.apply(Joined(0.0, f"node-{number}", "id", 1, "10.0.0.1", 4000))
    machine.apply(Tick(1.0))
    assert machine.phase == RUNNING and machine.generation.size == members
    return change(machine, journal, "node-0", 10.0)


@pytest.mark.parametrize("members", [1024, pytest.param(16384, marks=pytest.mark.matrix)])
def test_a_change_costs_a_member_the_same_whatever_the_size_and_the_coordinator_no_more_than_linear(members, capsys):
    small, cost = measure(64), measure(members)
    print(json.dumps({"members": members, "seconds": round(cost.seconds, 3), "messages": cost.messages}))
    assert cost.messages == small.messages == 3  # to stop, it has ended, its place
    assert cost.largest <= small.largest + 8  # only numbers grow
    assert cost.seconds < 2e-4 * members  # 25 microseconds a member here
