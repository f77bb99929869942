"""Thousands of supervisors in this process, whose time and links are emulated: a message is LINK seconds under way, and
a node takes COST seconds for each that it sends or gets, one after the other. All else is the real thing."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from shoal.elastic import coordinator, leadership
from shoal.elastic.connection import Connection
from shoal.elastic.messages import Join
from shoal.elastic.records import encode

LINK, COST = 100e-6, 20e-6


class Selector(selectors.DefaultSelector):
    """Waits for nothing: time jumps to what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will happen any more"
        self.now += max(0.0, timeout)
        return super().select(0)


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

    def __init__(self, net: Net, here: int, there: int) -> None:
        self._net, self.here, self.there = net, here, there
        self._came: asyncio.Queue[Any] = asyncio.Queue()
        self.other: End | None = None
        self._open = True

    @property
    def own_host(self) -> str:
        return "10.0.0.1"

    def send(self, message: Any) -> None:
        if self._open:
            assert len(encode(message)) <= 1 << 16
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
        self.host, self.port, self._welcome = "10.0.0.1", len(self.net.doors) + 1, welcome
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


def simulated(monkeypatch: pytest.MonkeyPatch, main: Callable[[Net], Coroutine[Any, Any, Any]]) -> Any:
    """Runs `main` with emulated time and links."""
    selector = Selector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    net = Net(lambda: selector.now)
    callers = iter(range(-1, -1 << 40, -1))

    class Here(Door):
        pass

    Here.net = net

    async def call(host: str, port: int, key: bytes, seconds: float = 2.0) -> End:
        await asyncio.sleep(2 * LINK)
        door = net.doors[port]
        if not door.open:
            raise ConnectionRefusedError("nobody listens")
        mine, theirs = End(net, next(callers), port), End(net, port, 0)
        mine.other, theirs.other = theirs, mine
        door.come(theirs)
        return mine

    async def refuses(host: str, port: int) -> bool:
        await asyncio.sleep(2 * LINK)
        return not net.doors[port].open

    with monkeypatch.context() as patch:
        patch.setattr(leadership, "Door", Here)
        patch.setattr(leadership, "call", call)
        patch.setattr(coordinator, "refuses", refuses)
        patch.setattr(time, "monotonic", lambda: selector.now)
        patch.setattr(time, "time", lambda: selector.now)
        try:
            return loop.run_until_complete(main(net))
        finally:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.close()
