"""Trees of relays over real sockets, two members below each: they come, go and die, and nobody speaks for another."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shoal.elastic import relay
from shoal.elastic.connection import Connection
from shoal.elastic.events import Limits
from shoal.elastic.messages import Ask, Beat, Drain, Elsewhere, Join, Passed, Report
from shoal.elastic.peers import Peer, Peers
from shoal.elastic.records import encode
from shoal.elastic.tunnel import FRAME, Passage, Piece, Tunnel
from tests.elastic.clock import in_a_loop
from tests.elastic.cluster import Member, close, generation, until

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setattr(relay, "FANOUT", 2)


async def tree(members: int, **limits: float) -> list[Member]:
    """A coordinator, and members that join one after the other; they train together."""
    first = Member("a").lead(Limits(**{"minimum": members, "settle": 0.0, **limits}))
    all_of_them = [first]
    for number in range(1, members):
        all_of_them.append(Member(chr(ord("a") + number)).join(first))
        await until(lambda number=number: number + 1 == sum("joined" in line for line in first.said))
    await until(lambda: generation(*all_of_them))
    return all_of_them


def above(member: Member, members: list[Member]) -> Member | None:
    """The relay of a member, None where it has a connection to the coordinator."""
    connection = member.supervisor._connection
    if not isinstance(connection, Passage):
        return None
    port = connection._hop._writer.get_extra_info("peername")[1]
    return next(each for each in members if each.at.address[1] == port)


def depth(member: Member, members: list[Member]) -> int:
    """How many relays there are between a member and the coordinator."""
    relay = above(member, members)
    return 0 if relay is None else 1 + depth(relay, members)


def below_each(coordinator: Member) -> list[int]:
    """How many members are below each of those that are connected to the coordinator."""
    peers = coordinator.at._coordinator._peers
    return sorted(peer.below for name, peer in peers.direct.items() if name != coordinator.at.name)


async def settled(members: list[Member]) -> None:
    """Waits until nobody looks for another way, and some time more in which somebody might."""
    await until(lambda: not any(each.at.detour.sought for each in members))
    await asyncio.sleep(0.3)
    await until(lambda: all(each.supervisor._connection is not None for each in members))


class Below(list[Connection]):
    """Stands for a Branch of these tunnels."""

    @property
    def last(self) -> Connection | None:
        return self[-1] if self else None

    def flush(self) -> None:
        """Nothing waits here."""


class Hears:
    """Stands for a connection."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def send(self, message: object) -> None:
        self.told.append(message)


@pytest.mark.parametrize(
    "below, asked",
    [
        ([0, 0, 0, 0], "m2"),  # two are too many above
        ([2], "m0.1"),  # there is room above
        ([1], "m0.0"),
        ([5, 1], "m0.4"),
        ([1, 5], "m1.4"),
        ([4, 2], ""),  # not half as many below the other one
        ([2, 0], ""),  # as many as a relay takes
        ([], ""),
    ],
)
def test_who_is_asked_to_come_again(below: list[int], asked: str) -> None:
    known = ["own", "first", "second", *(f"m{number}" for number in range(len(below)))]
    peers, hears = Peers("own", dict.fromkeys(known, "")), {}

    def put(name: str, branch: Below | None) -> Peer:
        hears[name] = Hears()
        join = Join(name, f"incarnation of {name}", 1, "127.0.0.1", 4000, 1, False, 1)
        peers.put(name, Peer(hears[name], join, branch, heard=0.0, admitted=True))
        return peers[name]

    put("own", Below())
    for number, count in enumerate(below):
        branch = put(f"m{number}", Below()).branch
        for each in range(count):
            branch.append(put(f"m{number}.{each}", None).connection)

    def told() -> list[str]:
        peers.even_out(2)
        found = [name for name, each in hears.items() if Elsewhere("127.0.0.1", 4000) in each.told]
        for each in hears.values():
            each.told.clear()
        return found

    assert told() == [asked] * bool(asked)
    assert asked not in told()  # once in a generation
    peers.settle()
    assert told() == [asked] * bool(asked)
    if asked:
        peers[asked].admitted = False
        peers.settle()
        assert asked not in told()


def test_a_standby_keeps_its_place():
    """It is not asked to come again, and who comes back does not take the place that another has meanwhile."""
    hears = {name: Hears() for name in ("own", "a", "b", "c", "d")}
    peers = Peers("own", dict.fromkeys(hears, ""))

    def put(*names: str, branch: Below | None = None) -> None:
        for name in names:
            join = Join(name, f"incarnation of {name}", 1, "127.0.0.1", 4000, 1, False, 1)
            peers.put(name, Peer(hears[name], join, branch, heard=0.0, admitted=True))

    def roster() -> str:
        peers.tell_roster({peer.join.incarnation: name for name, peer in peers.items()})
        return " ".join(each.split()[0] for each in peers.roster)

    put("own", "b", branch=Below())
    put("c", "a")
    assert roster() == "own a b"  # the first ones in the order of all members
    peers["b"].branch.append(hears["a"])  # the last one below the only relay, so that it could come again
    peers.even_out(2)
    assert Elsewhere("127.0.0.1", 4000) not in hears["a"].told
    put("d")
    peers["b"].branch.append(hears["d"])
    peers.even_out(2)
    assert Elsewhere("127.0.0.1", 4000) in hears["d"].told
    del peers["a"]
    assert roster() == "own b c"
    put("a")
    assert roster() == "own b c"


@in_a_loop
async def test_a_tree_agrees_on_a_generation_and_ends_together():
    members = await tree(9)
    assert [depth(each, members) for each in members] == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert sorted(each.runs.first for each in members) == list(range(9))
    members[-1].supervisor.wish(Ask(2))  # from the very bottom
    assert [await each.task for each in members] == [130] * 9


@in_a_loop
async def test_a_relay_that_dies_is_replaced_and_only_its_own_ranks_are_lost():
    members = a, b, *others = await tree(9, minimum=1)
    below = [each for each in others if depth(each, members)]
    await b.die()
    left = [a, *others]
    assert await until(lambda: generation(*left)) < 1.0
    assert a.runs.why == "b is gone" and len([line for line in a.said if "is gone:" in line]) == 1
    assert below and all(each.starts[-2].ended.message == "" for each in below)  # their ranks were told to leave
    assert max(depth(each, left) for each in left) <= 2
    now = generation(*left)
    await until(lambda: below_each(a) == [2, 3])  # c had up to five below, and who came in place of b nobody
    await settled(left)
    assert generation(*left) == now and below_each(a) == [2, 3]
    await close(*left)


@in_a_loop
async def test_who_comes_by_another_way_with_old_news_stays_and_can_come_once_more():
    members = a, *_, last = await tree(9)
    way, number = last.supervisor._connection, generation(*members)
    last.at.running = number - 1  # as if the start of its ranks were still under way to it
    last.at.detour.seek(*a.at.address)
    await until(lambda: not last.at.detour.sought)
    last.at.running = number
    assert last.supervisor._connection is way
    last.at.detour.seek(*a.at.address)
    await until(lambda: last.supervisor._connection not in (way, None))
    await settled(members)
    assert generation(*members) == number and {len(each.starts) for each in members} == {1}
    await close(*members)


@in_a_loop
async def test_what_was_said_by_another_way_that_is_not_taken_is_said_again():
    a = Member("a").lead(Limits(maximum=1, settle=0.0))
    await until(lambda: generation(a))
    b = Member("b").join(a)
    ready = a.at._coordinator.machine.roster.ready
    await until(lambda: ready.get("b") == 1)
    b.at.running, offer = 9, b.at.offer

    def one_more() -> tuple[int, bool]:
        b.ranks = 2
        return offer()

    b.at.offer = one_more
    b.at.detour.seek(*a.at.address)
    await until(lambda: not b.at.detour.sought)
    assert b.ranks == 2
    await until(lambda: ready["b"] == 2)
    await close(a, b)


@in_a_loop
async def test_members_below_a_relay_that_is_silent_go_elsewhere_before_their_ranks_have_to_end():
    members = _, _, *others = await tree(7)
    parent = above(others[-1], members)
    assert parent is not None
    for child in parent.at.relay._children:
        child.connection.send = lambda message: None  # nothing comes down any more
    moved = [each for each in others if above(each, members) is parent]
    before = {each.name: each.supervisor._connection for each in moved}
    await until(lambda: all(each.supervisor._connection not in (None, before[each.name]) for each in moved))
    await until(lambda: below_each(members[0]) == [2, 2])  # the coordinator has two again: who came to it went below
    await settled(members)
    assert generation(*members) == 1 and {len(each.starts) for each in members} == {1}  # nobody's ranks have noticed
    await close(*members)


@in_a_loop
async def test_a_member_cannot_speak_for_another():
    """A member below a relay sends frames on tunnels that are not its own, and its own again: at most its own end."""
    members = a, *_ = await tree(7)
    bad, other = [each for each in members if depth(each, members)][:2]
    passage = bad.supervisor._connection
    sent: list[Piece] = []
    put, passage._tunnel._put = passage._tunnel._put, lambda kind, rest: sent.append(Piece(0, kind, rest))
    passage._tunnel.send(Report(1, "failed", 9, 0, "in the name of another", 1, False))
    for number in range(1, 30):  # numbers that its relay and the coordinator use for others
        passage._hop.send(Passed([str(Piece(number, FRAME, sent[0].rest))]))
    passage._hop.send(Beat(10**6))
    await asyncio.sleep(0.1)
    assert generation(*members) == 1 and not any("in the name of" in line for line in a.said)
    put(FRAME, sent[0].rest)
    put(FRAME, sent[0].rest)
    await until(
        lambda: any(f"{bad.at.name} was hung up on: it sent a frame that is not signed" in line for line in a.said)
    )
    await until(lambda: generation(*members) > 1)
    assert other.starts[1].start.why.startswith(f"ranks of {bad.at.name} ended")
    await close(*members)


@in_a_loop
async def test_a_relay_that_drains_leaves_and_the_coordinator_that_dies_is_replaced():
    a, b, *others = await tree(7, minimum=1)
    b.supervisor.wish(Drain())
    assert await b.task == 143
    await until(lambda: generation(a, *others) > 1)
    await until(lambda: all(len(each.at.succession.candidates) == 3 for each in others))
    await a.die()
    await until(lambda: generation(*others) > 2, 30)
    await close(*others)


def test_frames_of_a_tunnel_cannot_be_changed_repeated_or_turned_round():
    async def check() -> None:
        way: list[tuple[str, str]] = []
        ends = [
            Tunnel(lambda kind, rest: way.append((kind, rest)), b"key", *numbers, calls=calls)
            for numbers, calls in ((("1", "2"), True), (("2", "1"), False))
        ]
        member, coordinator = ends
        member.send(Drain())
        coordinator.take(*way[0])
        assert await coordinator.receive() == Drain()
        first = way[0][1]
        for wrong in (first, first[:-8] + "AAAAAAA=", "%", encode(Drain()).decode(), "é", "A" * 9):
            coordinator.take(FRAME, wrong)
            with pytest.raises(ValueError):
                await coordinator.receive()
        member.take(*way[0])
        with pytest.raises(ValueError):
            await member.receive()
        long = Report(1, "failed", 1, 0, "x" * 60_000, 1, False)
        way.clear()
        member.send(long)
        for kind, piece in way:
            coordinator.take(kind, piece)
        assert len(way) == 3 and await coordinator.receive() == long
        for _ in range(4):  # parts without an end
            coordinator.take("part", "AAAA")
        with pytest.raises(ValueError):
            await coordinator.receive()

    asyncio.run(check())


@pytest.mark.matrix
def test_processes_whose_relay_is_killed_go_on(tmp_path):
    """Seven supervisors as processes, each at an address of its own: two below the coordinator, four below those."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> Path:
        log = tmp_path / f"{len(running)}.log"
        command, env = [sys.executable, "-m", "tests.elastic.pretend", *arguments], {**os.environ, "FANOUT": "2"}
        with log.open("wb") as file:
            running.append(subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT))
        return log

    def said(log: Path) -> list[dict]:
        return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]

    def wait_for(logs: list[Path], nodes: int) -> float:
        deadline = time.monotonic() + 60
        while not all((lines := said(log)) and lines[-1].get("nodes") == nodes for log in logs):
            assert time.monotonic() < deadline, [log.read_text() for log in logs]
            time.sleep(0.01)
        return max(said(log)[-1]["time"] for log in logs)

    try:
        logs = [start("lead", "127.0.0.2")]
        while not said(logs[0]):
            time.sleep(0.01)
        port = str(said(logs[0])[0]["port"])
        for number in range(3, 9):
            logs.append(start("join", "127.0.0.2", port, f"127.0.0.{number}"))
            wait_for(logs, len(logs))
        relays = [each for each in running[1:] if len(_peers(each.pid)) > 1]
        assert relays and all(len(_peers(each.pid)) <= 3 for each in running[1:])
        at = time.time()
        relays[0].kill()
        left = [log for log, process in zip(logs, running, strict=True) if process is not relays[0]]
        assert wait_for(left, 6) - at < 2.0
    finally:
        for process in running:
            process.kill()
            process.wait()


def _peers(pid: int) -> list[object]:
    """The connections of a process."""
    return [each for each in psutil.Process(pid).net_connections("tcp") if each.status == "ESTABLISHED"]
