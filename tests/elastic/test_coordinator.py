"""Supervisors and their coordinator over real sockets: members come, go and die, and strangers are kept out."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shoal.comm import hello
from shoal.comm.sealed import sealed
from shoal.elastic.connection import MOST_BYTES, call
from shoal.elastic.door import PENDING
from shoal.elastic.election import Candidate
from shoal.elastic.events import Left, Limits
from shoal.elastic.leadership import FIRST_PATIENCE
from shoal.elastic.messages import Ask, Beat, Drain, Heard, Join, Report
from shoal.elastic.records import encode
from shoal.elastic.succession import QUIET
from shoal.errors import LaunchError
from tests.elastic.clock import in_a_loop
from tests.elastic.cluster import KEY, Member, close, generation, until

pytestmark = pytest.mark.fast


def frame(message: Any, key: bytes, sender: str, number: int) -> bytes:
    return sealed(encode(message), key, sender, number)


@in_a_loop
async def test_members_join_late_and_the_world_grows_at_a_step_boundary():
    a, b = Member("a", 2).lead(), Member("b", 3)
    await until(lambda: generation(a) == 1)
    b.join(a)
    await until(lambda: generation(a, b) == 2)
    assert a.starts[0].ended.outcome == "stopped"
    assert [(each.runs.first, each.runs.size, each.runs.args) for each in (a, b)] == [
        (0, 5, ["size=5"]),
        (2, 5, ["size=5"]),
    ]
    assert (
        a.runs.why == "b joins"
        and (a.runs.step, a.runs.live) == (10, True)
        and any("b joined" in line for line in a.runs.events)
    )
    for member in (a, b):
        member.starts[-1].end("finished")
    assert [await a.task, await b.task] == [0, 0]


@in_a_loop
async def test_a_member_that_dies_or_drains_is_gone_at_once_and_the_others_go_on():
    a = Member("a").lead(Limits(minimum=3, settle=0.5))
    b, c, d = (Member(name).join(a) for name in "bcd")
    await until(lambda: generation(a, b, c, d) == 1)
    await d.die()
    assert await until(lambda: generation(a, b, c) == 2) < 1.0
    b.supervisor.wish(Drain())
    assert await b.task == 143
    await asyncio.sleep(0.3)
    assert not any(each.runs for each in (a, c))  # two are too few
    e = Member("e").join(c)  # who is told where the coordinator is
    await until(lambda: generation(a, c, e) == 3)
    assert a.starts[-1].start.step == 20
    a.supervisor.wish(Ask(2))
    assert [await a.task, await c.task, await e.task] == [130, 130, 130]


@in_a_loop
async def test_a_failed_rank_starts_all_again_and_a_mistake_ends_the_job():
    a = Member("a").lead(Limits(minimum=2))
    b = Member("b").join(a)
    await until(lambda: generation(a, b) == 1)
    b.starts[-1].end("failed", 1, 5, "KeyError: 'x'")
    await until(lambda: generation(a, b) == 2)
    assert "KeyError: 'x'" in a.runs.why and (a.runs.step, a.runs.live) == (10, True)
    b.starts[-1].end("failed", 2, 5, "the corpus is empty")
    assert [await a.task, await b.task] == [2, 2] and any("the corpus is empty" in line for line in b.said)


@in_a_loop
async def test_a_standby_takes_over_from_a_coordinator_that_is_killed_and_another_one_from_it():
    a = Member("a").lead(Limits(minimum=4))
    members = [b, c, d] = [Member(name) for name in "bcd"]
    for number, member in enumerate(members, start=2):
        member.join(a)
        await until(lambda number=number: sum("joined" in line for line in a.said) == number)
    await until(lambda: generation(a, b, c, d))
    await until(lambda: len(d.at.succession.candidates) == 3)
    await a.die()
    assert await until(lambda: generation(b, c, d)) < 3.0
    await until(lambda: sorted(each.name for each in d.at.succession.candidates) == ["b", "c", "d"])
    await b.die()
    assert await until(lambda: generation(c, d)) < 3.0
    e = Member("e").join(d)
    await until(lambda: generation(c, d, e))
    await close(c, d, e)


class Stopped:
    """Has a member be still, as a process that is stopped, until it goes on: it looks for nobody, and is not heard."""

    def __init__(self, member: Member) -> None:
        self._on, ask = asyncio.Event(), member.at.succession.whom_to_ask

        async def whom_to_ask(name: str) -> list[Candidate | None]:
            await self._on.wait()
            return await ask(name)

        member.at.succession.whom_to_ask = whom_to_ask
        member.supervisor._connection.abort()

    def go_on(self) -> None:
        self._on.set()


@pytest.mark.parametrize("names", ["cdef", ""])
def test_a_standby_with_an_old_journal_reads_on(tmp_path: Path, names: str):
    """All whom it knew have died. It must not train beside those that came later; where nobody did, it goes on."""

    @in_a_loop
    async def run() -> None:
        a = Member("a", journals=tmp_path).lead(Limits(minimum=1, settle=0.0))
        b, *others = [Member(name, journals=tmp_path).join(a) for name in "b" + names[:1]]
        await until(lambda: generation(a, b, *others) and b.name in str(b.at.succession.candidates))
        stopped = Stopped(b)
        others += [Member(name, journals=tmp_path).join(a) for name in names[1:]]
        await until(lambda: generation(a, *others))
        known = generation(a, *others)
        for each in (a, *others[:1]):
            await each.die()
        later = others[1:]
        await until(lambda: not later or generation(*later))
        stopped.go_on()
        await until(lambda: generation(b, *later))
        assert (b.at._coordinator is None) == bool(later)
        assert [each.start.nodes for each in b.starts if each.start.generation > known] == [len(later) + 1]
        await close(b, *later)

    run()


@in_a_loop
async def test_a_coordinator_that_drains_hands_over():
    a = Member("a").lead(Limits(minimum=1))
    b = Member("b").join(a)
    await until(lambda: generation(a, b))
    a.supervisor.wish(Drain())
    assert await a.task == 143
    await until(lambda: generation(b) > 1)
    assert b.starts[0].ended.outcome == "stopped"
    await close(b)


@in_a_loop
async def test_all_nodes_that_drain_at_once_leave_and_none_trains_on():
    a = Member("a").lead(Limits(minimum=1))
    b, c = Member("b").join(a), Member("c").join(a)
    await until(lambda: generation(a, b, c))
    number = generation(a, b, c)
    for member in (a, b, c):
        member.supervisor.wish(Drain())
    assert [await a.task, await b.task, await c.task] == [143, 143, 143]
    assert all(each.starts[-1].start.generation == number for each in (a, b, c))


@in_a_loop
async def test_a_node_whose_ranks_could_not_save_leaves_with_that_and_the_others_go_on():
    a = Member("a").lead(Limits(minimum=1))
    b = Member("b").join(a)
    await until(lambda: generation(a, b))
    number = generation(a, b)
    for member in (a, b):  # of all ranks the save fails
        full = partial(member.starts[-1].end, "stopped", 5, message="No space left on device", holds=True)
        member.starts[-1].end = lambda *args, full=full, **kwargs: full()
    b.supervisor.wish(Drain())
    assert await b.task == 5
    assert any("error: this node leaves, but the newest weights are not saved: No space" in line for line in b.said)
    await until(lambda: generation(a) == number + 1)  # from memory
    a.supervisor.wish(Drain())
    assert await a.task == 143  # its ranks have saved


@in_a_loop
async def test_a_node_that_wants_to_leave_tells_the_next_coordinator_too():
    a = Member("a").lead(Limits(minimum=1))
    b, c = Member("b").join(a), Member("c").join(a)
    await until(lambda: generation(a, b, c) and len(c.at.succession.candidates) == 3)
    b.supervisor._connection.send = lambda message: None  # the coordinator dies before it hears it
    b.supervisor.wish(Drain())
    await a.die()
    assert await b.task == 143
    await until(lambda: generation(c))
    await close(c)


@in_a_loop
async def test_two_of_one_name_are_told_apart_and_one_that_comes_back_has_its_place_again():
    a = Member("host").lead(Limits(minimum=3))
    b, c = Member("host").join(a), Member("host").join(a)
    await until(lambda: generation(a, b, c))
    assert sorted(each.at.name for each in (a, b, c)) == ["host", "host.2", "host.3"]
    second = next(each for each in (b, c) if each.at.name == "host.2")
    first = second.runs.first
    await second.die()
    await until(lambda: any("host.2 is gone" in line for line in a.said))
    again = Member("host").join(a)
    others = [each for each in (a, b, c) if each is not second]
    await until(lambda: generation(*others, again))
    assert again.at.name == "host.2" and again.runs.first == first
    await close(*others, again)


@in_a_loop
async def test_a_member_that_is_silent_ends_its_ranks_before_the_others_go_on():
    a = Member("a").lead(Limits(minimum=1))
    b, c = Member("b").join(a), Member("c").join(a)
    await until(lambda: generation(a, b, c))
    real = b.supervisor._connection
    real.send = lambda message: None  # what it says is lost, what it hears is not
    took = await until(lambda: b.starts[0].ended is not None)
    assert took < 1.5 and generation(a, b, c) != 2
    assert b.starts[0].holds  # what they had in memory is still there
    await until(lambda: generation(a, b, c) > 1)  # it has found the coordinator again
    assert a.starts[1].start.why in ("ranks of b ended: it was cut off, and its ranks have left", "b is gone")
    await close(a, b, c)


@in_a_loop
async def test_a_coordinator_that_must_not_go_on_follows_the_larger_side():
    a = Member("a").lead(Limits(minimum=3))
    b, c = Member("b").join(a), Member("c").join(a)
    await until(lambda: generation(a, b, c) and len(c.at.succession.candidates) == 3)
    for name in "bc":
        a.at._coordinator.tell(Left(0.0, name, False, "it was silent"))
    await until(lambda: any("this node stops" in line for line in a.said))
    assert a.runs is None
    took = await until(lambda: generation(a, b, c) > 1)
    assert took > QUIET - 1.0 and a.at._coordinator is None  # nobody's port had refused
    await close(a, b, c)


@in_a_loop
async def test_who_does_not_know_the_secret_is_refused_and_told_so():
    a = Member("a").lead()
    await until(lambda: generation(a))
    with pytest.raises(hello.Stranger):
        await call(*a.at.address, b"another key")
    await until(lambda: any("127.0.0.1 was refused" in line for line in a.said))
    stranger = Member("b")
    object.__setattr__(stranger.node, "key", b"another key")
    stranger.at.follow([a.at.address])
    began = time.monotonic()
    with pytest.raises(LaunchError, match="it has another secret"):
        await stranger.supervisor.run()
    assert time.monotonic() - began < FIRST_PATIENCE / 4  # at once: no secret changes while it waits
    assert generation(a) == 1
    await close(a)


JOIN = Join("x", "id", 1, "127.0.0.1", 9, 0, False, 0)


@in_a_loop
async def test_malformed_frames_of_one_that_knows_the_secret_disturb_nobody():
    a = Member("a").lead()
    b = Member("b").join(a)
    await until(lambda: generation(a, b))
    number = generation(a, b)
    noise = random.Random(0)

    async def offend(send: Callable[[Any], bytes], first: Any = None) -> None:
        connection = await call(*a.at.address, KEY)
        if first is not None:
            connection.send(first)
        connection._writer.write(send(connection))
        with pytest.raises(OSError):
            while True:
                await connection.receive()

    def framed(message: Any, number: int = 0, way: str = "member") -> Callable[[Any], bytes]:
        return lambda connection: frame(message, connection._out.key, way, number)

    wrong = [
        lambda connection: struct.pack("!IQ32s", MOST_BYTES + 1, 0, b""),  # oversized
        lambda connection: struct.pack("!IQ32s", 2**32 - 1, 0, b"") + b"x" * 1000,
        lambda connection: noise.randbytes(5000),
        framed(JOIN, number=1),  # out of order
        framed(Heard(1), way="coordinator"),  # another direction
        framed(Beat(1)),  # before Join
        lambda connection: frame(JOIN, KEY, "member", 0),  # of another connection
        lambda connection: frame(JOIN, connection._out.key, "member", 0).replace(b'"x"', b'"y"'),
        framed(Join("../x", "id", 1, "127.0.0.1", 9, 0, False, 0)),
        framed(Join("x", "id", -1, "127.0.0.1", 9, 0, False, 0)),
    ]
    for each in wrong:
        await offend(each)
    await asyncio.gather(*(offend(lambda connection: noise.randbytes(noise.randrange(44, 900))) for _ in range(20)))
    said = "\n".join(a.said)
    assert said.count("was hung up on") + said.count("hung up:") >= 25 and "65,537 bytes" in said
    assert generation(a, b) == number
    await close(a, b)


@in_a_loop
async def test_frames_that_come_again_end_only_their_connection():
    """A member's own frames, recorded and sent again over its connection: it joins, then is cut off and is gone."""
    a = Member("a").lead(Limits(maximum=1, settle=0.0))
    await until(lambda: generation(a))
    connection = await call(*a.at.address, KEY)
    again = frame(JOIN, connection._out.key, "member", 0)
    connection._writer.write(again + again)
    with pytest.raises(OSError):
        while True:
            await connection.receive()
    await until(lambda: any("x is gone" in line for line in a.said))
    assert any("x was hung up on: it sent a frame that is not signed, or comes again" in line for line in a.said)
    assert generation(a) == 1
    await close(a)


@in_a_loop
async def test_members_that_lie_are_not_believed():
    a = Member("a").lead(Limits(maximum=1))
    await until(lambda: generation(a))
    connection = await call(*a.at.address, KEY)
    connection.send(JOIN)
    for report in (Report(1, "failed", 2, 0, "no member of it", 1, True), Report(9, "finished", 0, 0, "", 1, False)):
        connection.send(report)
    connection.send(Report(1, "odd", 0, 0, "", 0, False))
    with pytest.raises(OSError):
        while True:
            await connection.receive()
    assert generation(a) == 1 and not a.task.done()
    await close(a)


@in_a_loop
async def test_half_open_connections_cost_nobody_anything():
    a = Member("a").lead()
    await until(lambda: generation(a))
    silent = [socket.create_connection(a.at.address) for _ in range(PENDING + 4)]
    halfway = silent.pop()
    b = Member("b")
    for end in silent[: PENDING // 2]:
        end.close()
    b.join(a)
    await until(lambda: generation(a, b) == 2)
    halfway.close()
    await until(lambda: sum("hung up" in line for line in a.said) >= PENDING)
    for end in silent:
        end.close()
    await close(a, b)


@in_a_loop
async def test_a_frame_that_stops_halfway_is_not_waited_for():
    a = Member("a").lead(Limits(maximum=1))
    await until(lambda: generation(a))
    connection = await call(*a.at.address, KEY)
    connection._writer.write(frame(JOIN, connection._out.key, "member", 0)[:-1])
    with pytest.raises(OSError):
        await connection.receive()
    assert generation(a) == 1
    await close(a)


@in_a_loop
async def test_a_supervisor_listens_on_the_chosen_address_only():
    a = Member("a").lead()
    host, port = a.at.address
    assert host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 1)
    await close(a)
