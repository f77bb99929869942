"""How a supervisor finds who coordinates, and coordinates itself where it founds the job or takes over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from shoal.comm.hello import Stranger
from shoal.elastic.connection import Connection, call
from shoal.elastic.coordinator import Coordinator, Site
from shoal.elastic.door import Door
from shoal.elastic.events import Finish, Generation, Limits, StepDown, TookOver
from shoal.elastic.journal import Journal
from shoal.elastic.liveness import LEASE, SILENCE
from shoal.elastic.membership import Membership
from shoal.elastic.messages import Admitted, Elsewhere, Join, Refused
from shoal.elastic.records import Malformed
from shoal.elastic.succession import Candidate, Succession
from shoal.errors import LaunchError, UserError

FIRST_PATIENCE, PATIENCE = 10.0, 300.0
"""Seconds for which a supervisor looks for a coordinator: before it was ever a member, and afterwards."""
_RETRY = 0.1


@dataclass(frozen=True)
class Node:
    """A host, and what it knows of the job.

    name: the wished one. incarnation: of this process.
    key: from the job's secret.
    open_store: opens a generation's store on an address; returns its port.
    arrange: returns further arguments of a program (the first argument) for a number of ranks (the second one).
    journal: makes the file of the journal of a coordinator here, with these lines.
    check: looks whether this host can run the job. Raises UserError.
    say: writes a line to the log.
    """

    name: str
    incarnation: str
    key: bytes
    open_store: Callable[[str], int]
    arrange: Callable[[list[str], int], list[str]]
    journal: Callable[[Admitted, list[str]], Journal]
    check: Callable[[Admitted], None]
    say: Callable[[str], None]


class Leadership:
    """The way of `node` to the coordinator.

    name: this member's, once it was admitted.
    running, newest: the generation whose ranks run here (0 for none), and the newest one known; kept by the caller.
    confirmed: when the coordinator has answered last (time.monotonic); kept by the caller from then on.
    offer: returns how many processes wait here, and the newest generation that one of them has left with its state.
    """

    def __init__(self, node: Node) -> None:
        self._node, self.name = node, node.name
        self.running = self.newest = 0
        self.confirmed = time.monotonic()
        self.offer: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.succession = Succession(Limits())
        self._job: Admitted | None = None
        self._door: Door | None = None
        self._connected = False
        self._coordinator: Coordinator | None = None
        self._coordinating: asyncio.Task[Finish | StepDown | None] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where this supervisor listens."""
        assert self._door is not None
        return self._door.host, self._door.port

    def lead(self, host: str, job: Admitted, limits: Limits) -> None:
        """Founds a job, and coordinates it on the address `host`."""
        self.listen(host)
        self._job = job
        self._coordinate(Membership(limits), self._node.journal(job, []))

    def follow(self, host: str, port: int) -> None:
        """Will join the job whose coordinator listens there."""
        self.succession.learn([Candidate("", host, port)])

    async def connect(self) -> tuple[Connection, Admitted]:
        """Becomes a member, again if it was one: finds who coordinates, or takes over.

        Raises LaunchError where nobody coordinates or knows the job's secret, UserError where this host cannot run the
        job.
        """
        self._connected = False
        found = None
        while found is None:
            found = await (self._find() if self._coordinator is None else self._join_own())
        connection, job = found
        if self._job is None:
            self._node.check(job)
        self._job, self.name, self._connected = job, job.name, True
        if self._coordinator is None:
            self.succession.begin(Limits(job.minimum, job.maximum))
        return connection, job

    async def ended(self) -> Finish | StepDown | None:
        """Returns how this supervisor has ceased to coordinate, if it did and its connection has ended because of that.
        Raises what ended the coordinator."""
        self._connected = False
        if self._coordinating is None:
            return None
        await asyncio.wait([self._coordinating], timeout=SILENCE)
        if not self._coordinating.done():
            return None
        end = self._coordinating.result()
        self._coordinator = self._coordinating = None
        if isinstance(end, StepDown):
            self.succession.deposed = True
        return end

    async def close(self) -> None:
        """Coordinates no more and listens no more."""
        if self._coordinating is not None:
            await asyncio.wait([self._coordinating], timeout=2 * SILENCE)
            self._coordinating.cancel()
        if self._door is not None:
            await self._door.close()

    async def _join_own(self) -> tuple[Connection, Admitted] | None:
        try:
            return await self._join(*self.address)
        except (OSError, TimeoutError):
            await self.ended()
            return None

    async def _find(self) -> tuple[Connection, Admitted] | None:
        """Joins who coordinates; None where that is now this supervisor."""
        began, last = time.monotonic(), "nobody answers"
        patience = PATIENCE if self._job is not None else FIRST_PATIENCE
        while time.monotonic() - began < patience:
            ended: set[str] = set()
            for candidate in self.succession.whom_to_ask():
                if candidate.name == self.name:
                    event = self.succession.take_over(self.name, ended, time.monotonic() - self.confirmed)
                    if event is not None:
                        self._take_over(event)
                        return None
                    continue
                try:
                    if (found := await self._join(candidate.host, candidate.port)) is not None:
                        return found
                except ConnectionRefusedError as error:
                    ended.add(candidate.name)
                    last = str(error)
                except Stranger:
                    last = "it has another secret"
                except (OSError, TimeoutError, Malformed) as error:
                    last = str(error) or "it does not answer"
            await asyncio.sleep(_RETRY)
        where = ", ".join(f"{each.host}:{each.port}" for each in self.succession.whom_to_ask())
        raise LaunchError(
            f"nobody coordinates a job at {where} ({last}). Look whether the first node still runs there, and whether "
            "this one has its secret (see docs/elastic.md)"
        )

    async def _join(self, host: str, port: int) -> tuple[Connection, Admitted] | None:
        """Asks to be a member; follows one hint to somebody else. Returns None where nobody coordinates there."""
        node = self._node
        for _ in range(2):
            sent = time.monotonic()
            connection = await call(host, port, node.key, LEASE)
            own_host, own_port = self.address if self._door is not None else self.listen(connection.own_host)
            ready, holds = self.offer()
            connection.send(
                Join(self.name, node.incarnation, ready, own_host, own_port, self.running, holds, self.newest)
            )
            try:
                async with asyncio.timeout(LEASE):
                    answer = await connection.receive()
            except BaseException:
                connection.abort()
                raise
            if isinstance(answer, Admitted):
                self.confirmed = max(self.confirmed, sent)
                return connection, answer
            connection.abort()
            if isinstance(answer, Refused):
                raise UserError(f"{host}:{port} does not take this node: {answer.why}")
            if not isinstance(answer, Elsewhere) or answer.port == 0:
                return None
            host, port = answer.host, answer.port
        return None

    def listen(self, host: str) -> tuple[str, int]:
        """Listens on an address only; by default on that from which the coordinator is reached."""
        self._door = Door(host, 0, self._node.key, self._welcome, self._node.say)
        return self.address

    async def _welcome(self, connection: Connection, join: Join) -> None:
        """Hands a member to the coordinator if that is here, else says who coordinates."""
        if self._coordinator is not None:
            await self._coordinator.welcome(connection, join)
            return
        self.succession.asked(join.name, join.newest)
        leader = self.succession.candidates[0] if self._connected else None
        connection.send(Elsewhere(leader.host, leader.port) if leader is not None else Elsewhere("", 0))
        await connection.close()

    def _take_over(self, event: TookOver) -> None:
        assert self._job is not None
        journal = self._node.journal(self._job, self.succession.journal.lines)
        self._coordinate(self.succession.machine, journal).tell(event)

    def _coordinate(self, machine: Membership, journal: Journal) -> Coordinator:
        assert self._job is not None
        program = self._job.program

        def open_store(generation: Generation) -> tuple[str, int]:
            return self.address[0], self._node.open_store(self.address[0])

        def arrange(size: int) -> list[str]:
            return self._node.arrange(program, size)

        site = Site(self.name, self._node.incarnation, self._job, open_store, arrange, self._node.say)
        self._coordinator = Coordinator(machine, journal, site)
        self._coordinating = asyncio.create_task(self._coordinator.run())
        return self._coordinator
