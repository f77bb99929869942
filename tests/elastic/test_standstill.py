"""When no rank of a generation comes further on any host, and what becomes of it."""

from __future__ import annotations

import asyncio

import pytest

from shoal.elastic import coordinator, supervisor
from shoal.elastic import standstill as room
from shoal.elastic.events import Limits
from shoal.elastic.standstill import SECONDS, STALE, Standstill
from shoal.elastic.watchdog import LEAST
from tests.elastic.clock import in_a_loop
from tests.elastic.cluster import Member, close, generation, until

pytestmark = pytest.mark.fast


def looks(told: dict[str, list[float]], number: int = 1, until: int = 12) -> list[int]:
    """At which seconds it is found of generation 1 and its members a and b, which tell something at these seconds."""
    found, standstill = [], Standstill()
    for second in range(until):
        for name, seconds in told.items():
            if second in seconds:
                standstill.take(name, number, float(second))
        if standstill.look(1, {"a", "b"}, float(second)):
            found.append(second)
    return found


ALWAYS = list(range(12))


@pytest.mark.parametrize(
    "told, found",
    [
        ({"a": ALWAYS, "b": ALWAYS}, [5, 11]),
        ({"a": ALWAYS, "b": ALWAYS[3:]}, [8]),
        ({"a": ALWAYS, "b": ALWAYS[:2] + ALWAYS[4:]}, [5, 11]),  # it may miss some
        ({"a": ALWAYS}, []),  # ranks of b work
        ({"a": ALWAYS[:2], "b": ALWAYS}, []),  # those of a have gone on
        ({"a": ALWAYS[:1], "b": ALWAYS[3:]}, []),  # and were never late together with those of b
        ({"a": ALWAYS, "b": [], "c": ALWAYS}, []),  # c is not in the generation
        ({}, []),
    ],
)
def test_all_members_have_to_tell_it_for_seconds(told, found):
    assert looks(told) == found


def test_what_was_told_of_another_generation_or_of_no_member_does_not_count():
    assert looks({"a": ALWAYS, "b": ALWAYS}, number=2) == []
    assert not Standstill().look(1, set(), 100.0)


def test_all_ranks_were_late_at_one_moment():
    """A rank that is late at the beginning and at the end of an interval shorter than LEAST was late all the time; that
    is so where what each told at the end is younger than the beginning."""
    assert STALE < SECONDS and SECONDS + STALE < LEAST


def test_supervisors_tell_that_their_ranks_are_stalled_and_have_them_leave_once_all_are(monkeypatch):
    monkeypatch.setattr(room, "SECONDS", 0.5)
    monkeypatch.setattr(supervisor, "_PACES", 1)
    monkeypatch.setattr(coordinator, "_LOOK_AT_PACES", 0.1)
    stalled: set[str] = set()

    def member(name: str) -> Member:
        return Member(name, stalled=lambda start: name in stalled and start.generation == 1)

    @in_a_loop
    async def run() -> None:
        a = member("a").lead(Limits(minimum=2, settle=0.1))
        b = member("b").join(a)
        await until(lambda: generation(a, b) == 1)
        stalled.add("a")
        await asyncio.sleep(1.5)
        assert generation(a, b) == 1
        stalled.add("b")
        await until(lambda: generation(a, b) == 2)
        assert "no rank of generation 1 comes further: all leave it" in a.said
        assert "stalled" in [each.starts[0].ended.message for each in (a, b)]  # what one says first ends the other's
        await close(a, b)

    run()
