"""How a supervisor finds who coordinates, and coordinates itself where it founds the job or takes over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.comm.hello import Stranger
from shoal.elastic.connection import Connection, call
from shoal.elastic.coordinator import Coordinator
from shoal.elastic.detour import Detour, Joined
from shoal.elastic.door import Door
from shoal.elastic.election import Candidate, Election, End, Office
from shoal.elastic.events import Generation, Limits, StepDown
from shoal.elastic.journal import Journal
from shoal.elastic.liveness import LEASE, SILENCE
from shoal.elastic.membership import Membership
from shoal.elastic.messages import BELOW, DIRECT, Admitted, Elsewhere, Join, Refused, Via
from shoal.elastic.records import Malformed
from shoal.elastic.relay import Relay
from shoal.elastic.site import Site
from shoal.elastic.succession import Succession
from shoal.elastic.tunnel import Passage
from shoal.errors import LaunchError, UserError

FIRST_PATIENCE, PATIENCE = 10.0, 300.0
"""Seconds for which a supervisor looks for a coordinator: before it was ever a member, and afterwards."""
_HOPS, _STRANGER = 12, "it has another secret"


@dataclass(frozen=True)
class Node:
    """A host, and what it knows of the job.

    name: the wished one. incarnation: of this process. key: from the job's secret.
    open_store: opens a generation's store on an address; returns its port.
    arrange: returns further arguments of a program (the first argument) for a number of ranks (the second one).
    journal: makes the file of the journal of a coordinator here, with these lines.
    written: returns the lines of the journals that coordinators have written, as far as this host sees them.
    check: looks whether this host can run the job. Raises UserError.
    say: writes a line to the log.
    """

    name: str
    incarnation: str
    key: bytes
    open_store: Callable[[str], int]
    arrange: Callable[[list[str], int], list[str]]
    journal: Callable[[Admitted, list[str]], Journal]
    written: Callable[[Admitted], list[list[str]]]
    check: Callable[[Admitted], None]
    say: Callable[[str], None]


class Leadership:
    """The way of `node` to the coordinator, whom `election` names: by default that of the standbys.

    name: this member's, once it was admitted.
    running, newest: the generation whose ranks run here (0 for none), and the newest one known; kept by the caller.
    confirmed: when the coordinator has answered last (time.monotonic); kept by the caller from then on.
    offer: returns how many processes wait here, and whether one of them has the state of the run in memory.
    told: how many waited when it was admitted last.
    direct: whether to avoid relays, because one was silent; set by the caller.
    detour: another way, once the coordinator has asked for one; `connect` returns it when the old one has ended.
    patience: seconds for which it looks for a coordinator before it was ever a member.
    """

    def __init__(self, node: Node, election: Election | None = None) -> None:
        self._node, self.name = node, node.name
        self.running = self.newest = self.told = 0
        self.confirmed, self.patience = time.monotonic(), FIRST_PATIENCE
        self.offer: Callable[[], tuple[int, bool]] = lambda: (0, False)
        self.succession = Succession(Limits(), lambda: node.written(self._job) if self._job else [])
        self.relay = Relay(lambda: time.monotonic() - self.confirmed, node.say)
        self.detour = Detour(self._another, lambda: not self.relay.busy)
        self._said: Join | None = None  # what it has told last of the processes here
        self._election: Election = election if election is not None else self.succession
        self._job: Admitted | None = None
        self._door: Door | None = None
        self._connected = self._was_member = self.direct = False
        self._coordinator: Coordinator | None = None
        self._coordinating: asyncio.Task[End] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where this supervisor listens."""
        assert self._door is not None
        return self._door.host, self._door.port

    def lead(self, host: str, job: Admitted, limits: Limits, port: int = 0) -> None:
        """Founds a job, and coordinates it on the address `host`."""
        self.listen(host, port)
        self._job = job
        self._take_over(Office(self.name, Membership(limits), [], None))

    def stand(self, job: Admitted | None) -> None:
        """Will join the job of the election, or found `job` where nobody coordinates there."""
        self._job = job

    def follow(self, places: list[tuple[str, int]]) -> None:
        """Will join the job of which supervisors listen there: hosts and ports."""
        self.succession.learn([Candidate("", host, port) for host, port in places])

    async def connect(self) -> Joined:
        """Becomes a member, again if it was one: finds who coordinates, or takes over.

        Raises LaunchError where nobody coordinates or knows the job's secret, UserError where this host cannot run the
        job.
        """
        self._connected = False
        found = await self._detoured()
        while found is None:
            found = await (self._find() if self._coordinator is None else self._join_own())
        connection, job = found
        if not self._was_member and self._coordinator is None:
            self._node.check(job)
        self._job, self.name, self._connected, self._was_member = job, job.name, True, True
        if self._coordinator is None:
            for each in (self.succession, self._election):
                each.begin(Limits(job.minimum, job.maximum))
        return connection, job

    async def ended(self) -> End:
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
        if (unused := await self.detour.take()) is not None:
            unused[0].abort()
        if self._door is not None:
            await self._door.close()

    async def _another(self, host: str, port: int) -> Joined | None:
        found, _ = await self._ask(Candidate("", host, port), set())
        return found

    async def _detoured(self) -> Joined | None:
        """Returns the other way, where what was told when it began still holds: news may have gone with the old one."""
        found, said = await self.detour.take(), self._said
        if found is None or said is None or (said.running, said.ranks, said.holds) == (self.running, *self.offer()):
            return found
        found[0].abort()
        return None

    async def _join_own(self) -> Joined | None:
        try:
            return await self._join(*self.address)
        except (OSError, TimeoutError):
            await self.ended()
            return None

    async def _find(self) -> Joined | None:
        """Joins who coordinates; None where that is now this supervisor."""
        last, until = "nobody answers", time.monotonic() + (PATIENCE if self._was_member else self.patience)
        while time.monotonic() < until:
            ended, said = set[str](), set[str]()
            try:
                for candidate in await self._election.whom_to_ask(self.name):
                    if candidate is None:
                        if self._job is not None and await self._took_over(ended):
                            return None
                        continue
                    found, why = await self._ask(candidate, ended)
                    if found is not None:
                        return found
                    last = why or last
                    said.add(why)
                if said == {_STRANGER} and self._job is None and self._election is self.succession:
                    break
            except OSError as error:
                last = str(error)
            await self._election.pause()
        raise LaunchError(
            f"nobody coordinates a job at {self._election} ({last}). Look whether the first node still runs there, and "
            "whether this one has its secret (see docs/elastic.md)"
        )

    async def _ask(self, candidate: Candidate, ended: set[str]) -> tuple[Joined | None, str]:
        """Asks a candidate to be a member; returns why not. Adds one whose process has ended to `ended`."""
        try:
            return await self._join(candidate.host, candidate.port), ""
        except ConnectionRefusedError as error:
            ended.add(candidate.name)
            return None, str(error)
        except Stranger:
            return None, _STRANGER
        except (OSError, TimeoutError, Malformed) as error:
            return None, str(error) or "it does not answer"

    async def _join(self, host: str, port: int) -> Joined | None:
        """Asks to be a member; goes where it is sent, to who coordinates or down to a relay. Returns None where nobody
        coordinates there."""
        first, way = (host, port), DIRECT if self.direct else ""
        for _ in range(_HOPS):
            try:
                connection, answer = await self._knock(host, port, way)
            except (OSError, TimeoutError, Malformed):
                if way != BELOW:
                    raise
                (host, port), way = first, DIRECT  # the relay has just gone, or cannot be reached from here
                continue
            if isinstance(answer, Admitted):
                self.direct = False
                return connection, answer
            connection.abort()
            if isinstance(answer, Refused):
                raise UserError(f"{host}:{port} does not take this node: {answer.why}")
            if isinstance(answer, Elsewhere) and answer.port:
                host, port, way = answer.host, answer.port, BELOW if answer.below else ""
                first = first if answer.below else (host, port)
            elif way == BELOW and isinstance(connection, Connection):
                (host, port), way = first, DIRECT
            else:
                return None
        return None

    async def _knock(self, host: str, port: int, way: str) -> tuple[Connection | Passage, Any]:
        """Asks a supervisor to be a member, by this `way` (see messages.Join); returns its answer."""
        sent = time.monotonic()
        connection = await call(host, port, self._node.key, LEASE)
        own_host, own_port = self.address if self._door is not None else self.listen(connection.own_host)
        ready, holds = self.offer()
        here = self.name, self._node.incarnation, ready, own_host, own_port, self.running, holds, self.newest
        join = self._said = Join(*here, way, self._connected)
        passage: Connection | Passage = connection
        try:
            async with asyncio.timeout(LEASE):
                connection.send(join)
                answer = await connection.receive()
                if isinstance(answer, Via) and way == BELOW:
                    passage = await Passage.open(connection, self._node.key)
                    passage.send(join)
                    answer = await passage.receive()
        except BaseException:
            connection.abort()
            raise
        if isinstance(answer, Admitted):
            self.confirmed, self.told = max(self.confirmed, sent), ready
        return passage, answer

    def listen(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listens on an address only; by default on that from which the coordinator is reached, at a free port."""
        self._door = Door(host, port, self._node.key, self._welcome, self._node.say)
        return self.address

    async def _welcome(self, connection: Connection, join: Join) -> None:
        """Hands a member to the coordinator if that is here, else says who coordinates."""
        if self._coordinator is not None:
            await self._coordinator.welcome(connection, join)
            return
        takes = join.way == BELOW and self._connected and not self.detour.sought
        if takes and await self.relay.serve(connection, join):
            return
        self.succession.asked(join.name, join.newest)
        leader = self.succession.candidates[0] if self._connected else None
        connection.send(Elsewhere(leader.host, leader.port) if leader is not None else Elsewhere("", 0))
        await connection.close()

    async def _took_over(self, ended: set[str]) -> bool:
        own, silent = Candidate(self.name, *self.address), time.monotonic() - self.confirmed
        office = await self._election.take_over(own, ended, silent)
        if office is not None:
            self._take_over(office)
        return office is not None

    def _take_over(self, office: Office) -> None:
        """Coordinates from now on."""
        assert self._job is not None
        job, tenure, self.name = self._job, office.tenure, office.name
        journal = Journal(None, office.lines) if tenure is not None else self._node.journal(job, office.lines)

        def open_store(generation: Generation) -> tuple[str, int]:
            return self.address[0], self._node.open_store(self.address[0])

        arrange, say = partial(self._node.arrange, job.program), self._node.say
        site = Site(self.name, self._node.incarnation, job, open_store, arrange, say, self._node.key, tenure)
        self._coordinator = Coordinator(office.machine, journal, site)
        run = self._coordinator.run()
        self._coordinating = asyncio.create_task(run if tenure is None else tenure.hold(run))
        if office.event is not None:
            self._coordinator.tell(office.event)
