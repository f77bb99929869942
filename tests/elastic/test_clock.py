"""The clock of supervisors in one process stands while their loop does."""

from __future__ import annotations

import asyncio
import time

import pytest

from shoal.elastic.events import Limits
from shoal.elastic.liveness import SILENCE
from tests.elastic.clock import TURN, Clock, in_a_loop
from tests.elastic.cluster import Member, close, generation, until

pytestmark = pytest.mark.fast


def test_a_turn_counts_as_long_as_it_may() -> None:
    real = [100.0]
    clock = Clock(lambda: real[0])
    real[0] += TURN / 2
    assert clock() == pytest.approx(100.0 + TURN / 2)
    real[0] += 5.0
    assert clock() == pytest.approx(100.0 + TURN)
    clock.turn(3.0)  # the loop waits
    real[0] += 2.0
    assert clock() == pytest.approx(102.0 + TURN)
    clock.turn(TURN)
    assert clock() == pytest.approx(102.0 + TURN)


@in_a_loop
async def test_members_notice_nothing_of_a_loop_that_stood():
    a = Member("a").lead(Limits(minimum=3))
    members = [a, Member("b").join(a), Member("c").join(a)]
    await until(lambda: generation(*members) == 1)
    before = time.monotonic()
    time.sleep(SILENCE + 0.1)  # all of them and the coordinator
    assert time.monotonic() - before <= TURN
    await asyncio.sleep(0.1)
    said = "\n".join(line for each in members for line in each.said)
    assert generation(*members) == 1 and "gone" not in said and "no coordinator" not in said
    await close(*members)
