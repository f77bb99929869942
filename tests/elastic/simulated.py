"""Thousands of supervisors in this process, whose time and links are emulated: a message is LINK seconds under way, and
a node takes COST seconds for each that it sends or gets, one after the other. All else is the real thing."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pytest

from shoal.elastic import coordinator, leadership, relay, supervisor
from shoal.elastic.connection import Connection
from shoal.elastic.events import Limits
from shoal.elastic.messages import Beat, Heard, Join
from shoal.elastic.records import encode
from shoal.elastic.tunnel import Passage
from tests.elastic.cluster import Member

LINK, COST = 100e-6, 20e-6
JOINING, LOOK = 0.05, 0.01
"""Seconds between two looks of a supervisor at its ranks: while all join, which nobody times; and then."""
AT_ONCE = 192
"""Members at most that knock within JOINING: the coordinator takes 100 microseconds for each."""

HERE: ContextVar[int] = ContextVar("the number of the node whose task this is")


class Selector(selectors.DefaultSelector):
    """Waits for nothing: time jumps to what comes next. Nothing comes from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will happen any more"
        self.now += max(0.0, timeout)
        return []


class Net:
    """The nodes, by their ports. messages: how many each has sent and got."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.doors: dict[int, Door] = {}
        self.messages: Counter[int] = Counter()
        self._free: dict[int, float] = {}

    def busy(self, node: int, since: float) -> float:
        """Has a node deal with a message; returns when it has."""
        self.messages[node] += 1
        self._free[node] = max(self._free.get(node, 0.0), since) + COST
        return self._free[node]


class End(Connection):
    """One end of an emulated connection, at the node `here`."""

    def __init__(self, net: Net, here: int) -> None:
        self._net, self.here = net, here
        self._came: asyncio.Queue[Any] = asyncio.Queue()
        self.other: End | None = None
        self._open = True

    @property
    def own_host(self) -> str:
        return "10.0.0.1"

    def send(self, message: Any) -> None:
        if self._open:
            assert isinstance(message, Beat | Heard) or len(encode(message)) <= 1 << 16
            self._carry(message)

    def _carry(self, message: Any) -> None:
        assert self.other is not None
        sent = self._net.busy(self.here, self._net.now())
        loop = asyncio.get_running_loop()
        loop.call_at(sent + LINK, self._arrive, self.other, message)

    def _arrive(self, other: End, message: Any) -> None:
        got = self._net.busy(other.here, self._net.now())
        asyncio.get_running_loop().call_at(got, other._came.put_nowait, message)

    async def receive(self) -> Any:
        message = await self._came.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def close(self, seconds: float = 0.0) -> None:
        self.abort()

    def abort(self) -> None:
        if self._open:
            self._open = False
            self._carry(ConnectionResetError("it hung up"))
            self._came.put_nowait(ConnectionResetError("hung up"))


class Door:
    """Where a node listens. Its port is the node's number."""

    net: Net

    def __init__(self, host: str, port: int, key: bytes, welcome: Callable[..., Any], say: Any) -> None:
        self.host, self.port, self._welcome = "10.0.0.1", HERE.get(), welcome
        self.net.doors[self.port] = self
        self.open = True
        self._tasks: set[asyncio.Task[None]] = set()

    def come(self, end: End) -> None:
        task = asyncio.create_task(self._hear(end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hear(self, end: End) -> None:
        try:
            join = await end.receive()
            assert isinstance(join, Join)
            await self._welcome(end, join)
        except OSError:
            return
        finally:
            end.abort()

    async def close(self) -> None:
        self.open = False
        for task in list(self._tasks):
            task.cancel()


def simulated(main: Callable[[Net, pytest.MonkeyPatch], Coroutine[Any, Any, Any]]) -> Any:
    """Runs `main` with emulated time and links, which may patch more."""
    selector = Selector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    net = Net(lambda: selector.now)

    class Here(Door):
        pass

    Here.net = net

    async def call(host: str, port: int, key: bytes, seconds: float = 2.0) -> End:
        await asyncio.sleep(2 * LINK)
        door = net.doors[port]
        if not door.open:
            raise ConnectionRefusedError("nobody listens")
        mine, theirs = End(net, HERE.get()), End(net, port)
        mine.other, theirs.other = theirs, mine
        door.come(theirs)
        return mine

    async def refuses(host: str, port: int) -> bool:
        await asyncio.sleep(2 * LINK)
        return not net.doors[port].open

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leadership, "Door", Here)
        patch.setattr(leadership, "call", call)
        patch.setattr(coordinator, "refuses", refuses)
        patch.setattr(time, "monotonic", lambda: selector.now)
        patch.setattr(time, "time", lambda: selector.now)
        try:
            return loop.run_until_complete(main(net, patch))
        finally:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@dataclass(frozen=True)
class Change:
    """seconds: from the death of the last node until all others have new places. most, mean: messages of a node
    meanwhile, sent and got. direct: members with a connection to the coordinator. relays: the most between it and one
    of them."""

    seconds: float
    most: int
    mean: float
    direct: int
    relays: int


def change(members: int, fanout: int = 64) -> Change:
    """Lets so many members join, and the last one die."""

    async def main(net: Net, patch: pytest.MonkeyPatch) -> Change:
        patch.setattr(supervisor, "_LOOK", JOINING)
        patch.setattr(relay, "FANOUT", fanout)
        HERE.set(1)
        first = Member("n0").lead(Limits(minimum=members, settle=0.0))
        nodes = [first]
        while len(nodes) < members:
            together = min(members - len(nodes), AT_ONCE, max(4, len(nodes) // 4))
            for number in range(len(nodes), len(nodes) + together):
                HERE.set(number + 1)
                nodes.append(Member(f"n{number}").join(first))
            await asyncio.sleep(JOINING)  # else all knock before there is a relay
        await until(lambda: all(each.runs is not None for each in nodes))
        patch.setattr(supervisor, "_LOOK", LOOK)
        await asyncio.sleep(2 * JOINING)
        first.at._coordinator.machine.limits = Limits(minimum=1, settle=0.0)
        before, began, left = +net.messages, net.now(), nodes[:-1]
        await nodes[-1].die()
        await until(lambda: all(each.runs is not None and each.runs.nodes == members - 1 for each in left))
        assert {each.runs.first for each in left} == set(range(members - 1))
        spent = [net.messages[node] - before[node] for node in range(1, members)]
        depths = _depths(left)
        return Change(net.now() - began, max(spent), sum(spent) / len(spent), depths.count(0) - 1, max(depths))

    found: Change = simulated(main)
    return found


def _depths(nodes: list[Member]) -> list[int]:
    """How many relays there are between each member and the coordinator."""
    depths: dict[int, int] = {}

    def depth(number: int) -> int:
        if number not in depths:
            way = nodes[number - 1].supervisor._connection
            assert isinstance(way, Passage | End)
            above = way._hop.other if isinstance(way, Passage) else None
            depths[number] = 0 if above is None else 1 + depth(above.here)
        return depths[number]

    return [depth(number) for number in range(1, len(nodes) + 1)]
