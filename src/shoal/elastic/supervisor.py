"""A node's supervisor: a member of the job that starts, watches and ends the ranks of its host.

    the coordinator (here or on another node) <--messages--> supervisor --> processes

It has its ranks leave when the coordinator says so, and by itself when no beat has been answered for LEASE seconds:
then it may have been cut off, and the others go on without it. Ranks that have left keep what they hold in memory, and
give it to the next generation that this node is in; those that have not left in time are killed.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from signal import SIGTERM
from typing import Any, Protocol

from shoal.elastic.connection import Connection
from shoal.elastic.election import Candidate
from shoal.elastic.events import CUT_OFF, NOW, StepDown
from shoal.elastic.leadership import Leadership, Node
from shoal.elastic.liveness import ALONE, BEAT, LEASE, LEAVING, RELAY_BEAT, RELAY_LEASE
from shoal.elastic.messages import (
    Admitted,
    Beat,
    Elsewhere,
    End,
    Entry,
    GiveUp,
    Heard,
    Held,
    Note,
    Over,
    Paces,
    Passed,
    Released,
    Report,
    Roster,
    Stalled,
    Start,
    Waiting,
)
from shoal.elastic.records import Malformed
from shoal.elastic.tunnel import Passage
from shoal.errors import CheckpointError, LaunchError

_LOOK = 0.02
_PACES = 4
"""Beats after which the pace of the ranks is told, and whether none of them comes further."""


class Ranks(Protocol):
    """The processes of a host that are ranks or will be; see crew.Crew."""

    @property
    def ready(self) -> int:
        """How many wait for a place."""

    @property
    def busy(self) -> bool:
        """Whether there are ranks that have not left their generation."""

    @property
    def holds(self) -> bool:
        """Whether a waiting one has the state of the run in memory."""

    @property
    def paces(self) -> Paces | None:
        """How fast the ranks work, where that is known."""

    @property
    def stalled(self) -> bool:
        """Whether none of the ranks comes further, and all wait for others; see standstill.py."""

    def begin(self, job: Admitted) -> None:
        """Starts the processes, once."""

    def place(self, start: Start) -> None:
        """Makes waiting processes ranks. Raises LaunchError where there are not enough."""

    def look(self) -> Report | None:
        """Returns how the ranks have left their generation, once all have; notices ranks that hang."""

    def leave(self, how: str) -> None:
        """Has the ranks leave their generation; see events.NOW."""

    def give_up(self) -> None:
        """Has the ranks leave at once if they are still stalled."""

    def kill(self) -> None:
        """Ends the ranks at once; does not wait."""

    def close(self) -> None:
        """Ends all processes."""


class Supervisor:
    """Supervises a node whose way to the coordinator is `leadership`, and whose processes are `ranks`."""

    def __init__(self, node: Node, leadership: Leadership, ranks: Ranks) -> None:
        self._say, self._at, self._ranks = node.say, leadership, ranks
        leadership.offer = lambda: (ranks.ready, ranks.holds)
        self._told = 0  # how many processes wait here, as the coordinator knows
        self._left: Report | None = None  # not told yet
        self._leaving = LEAVING
        self._cut = 0, 0.0  # the last generation that ranks were told to leave without a coordinator, and when
        self._connection: Connection | Passage | None = None
        self._beats: dict[int, float] = {}
        self._wishes: list[Any] = []
        self._unsaved = ""  # why the last checkpoint of the ranks is not written
        self._code: int | None = None

    def wish(self, message: Any) -> None:
        """Has the coordinator told that this node wants to leave (Drain) or that the job is to end (Ask); also the next
        one, where this one dies of the same."""
        self._wishes.append(message)
        if self._connection is not None:
            self._connection.send(message)

    async def run(self) -> int:
        """Supervises until the job is over or this node has left; returns the exit code. Raises what
        `Leadership.connect` raises."""
        tasks = [asyncio.create_task(self._stay()), asyncio.create_task(self._tick())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            assert self._code is not None
            return self._code
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._ranks.close()
            await self._at.close()

    async def _stay(self) -> None:
        """Is a member until the job is over for this node."""
        while self._code is None:
            connection, job = await self._at.connect()
            self._told = self._at.told
            self._ranks.begin(job)
            if self._at.running and job.generation != self._at.running:
                self._say(f"generation {self._at.running} is over: its ranks leave it")
                self._at.running = 0
                await self._leave()
            self._connection = connection
            self._at.relay.attach(connection)
            for wish in self._wishes:
                connection.send(wish)
            try:
                while self._code is None and self._connection is connection:
                    await self._obey(connection, await connection.receive())
            except Malformed as error:
                self._say(f"the coordinator was hung up on: it sent {error}")
            except OSError:
                self._connection = None  # who coordinates now is found out next
            finally:
                self._connection = None
                self._at.relay.detach()
                connection.abort()
            if self._code is None and isinstance(end := await self._at.ended(), StepDown):
                self._say(f"this node stops: {end.why}. It looks for the others")
                self._at.running = 0
                await self._leave()

    async def _leave(self) -> None:
        """Has the ranks leave with what they hold in memory; soon kills those that have not."""
        self._ranks.leave(NOW)
        late = time.monotonic() + self._leaving
        while self._ranks.busy and time.monotonic() < late:
            await asyncio.sleep(_LOOK)
        await self._end_ranks()

    async def _end_ranks(self) -> None:
        """Kills ranks, and waits until `_tick` has seen their end."""
        self._ranks.kill()
        while self._ranks.busy:
            await asyncio.sleep(_LOOK)

    def _offer(self) -> tuple[int, bool]:
        """Returns what the coordinator is told now of the processes that wait; see Ranks.ready, Ranks.holds."""
        self._told = self._ranks.ready
        return self._told, self._ranks.holds

    async def _obey(self, connection: Connection | Passage, message: Any) -> None:
        succession = self._at.succession
        if isinstance(message, Heard):
            sent = self._beats.pop(message.number, 0.0)
            self._at.confirmed = max(self._at.confirmed, sent - 1e-3 * max(0, message.age))
        elif isinstance(message, Passed):
            self._at.relay.down(message.pieces)
        elif isinstance(message, Start):
            await self._end_ranks()
            self._start(connection, message)
        elif isinstance(message, End):
            self._end(connection, message)
        elif isinstance(message, GiveUp):
            if message.generation == self._at.running:
                self._ranks.give_up()
        elif isinstance(message, Entry):
            connection.send(Held(max(map(succession.take, message.lines), default=0)))
        elif isinstance(message, Roster):
            try:
                succession.learn([Candidate.read(each) for each in message.candidates])
            except ValueError as error:
                raise Malformed(f"a roster {message.candidates!r:.200}: {error}") from None
        elif isinstance(message, Elsewhere):
            self._at.detour.seek(message.host, message.port)
        elif isinstance(message, Note):
            self._say(message.text)
        elif isinstance(message, Released):
            self._code = self._ends_with(128 + SIGTERM)
        elif isinstance(message, Over):
            self._code = self._ends_with(message.code)
            self._say(f"the job has ended: {message.why}")

    def _ends_with(self, code: int) -> int:
        """Returns the exit code of a node that is to end with `code`: where it leaves, and its ranks could not write
        the checkpoint before, that of the failure, which is said."""
        if code != 128 + SIGTERM or not self._unsaved:
            return code
        self._say(f"error: this node leaves, but the newest weights are not saved: {self._unsaved}")
        return CheckpointError.exit_code

    def _start(self, connection: Connection | Passage, start: Start) -> None:
        self._at.running = self._at.newest = start.generation
        self._told, self._unsaved = 0, ""
        self._leaving = ALONE if start.ranks == start.size else LEAVING
        try:
            self._ranks.place(start)
        except LaunchError as error:
            self._at.running = 0
            connection.send(Report(start.generation, "lost", 0, -1, str(error), *self._offer()))

    def _end(self, connection: Connection | Passage, end: End) -> None:
        if end.generation != self._at.running:
            connection.send(Report(end.generation, "stopped", 0, -1, "no rank ran", *self._offer()))
        elif self._ranks.busy:
            self._ranks.leave(end.how)

    async def _tick(self) -> None:
        """Beats, looks after the ranks, and ends them where this node may have been cut off."""
        number, next_beat, before = 0, 0.0, time.monotonic()
        while True:
            await asyncio.sleep(_LOOK)
            now, connection = time.monotonic(), self._connection
            stood, before = now - before - _LOOK, now
            self._at.relay.watch(now, stood if stood > BEAT else 0.0)
            if connection is not None and now >= next_beat:
                number, next_beat = number + 1, now + (RELAY_BEAT if self._at.relay.busy else BEAT)
                self._beats[number] = now
                connection.send(Beat(number))
                if number % _PACES == 0 and self._at.running:
                    self._tell_progress(connection)
            self._left = self._ranks.look() or self._left
            if connection is not None:
                self._tell(connection)
            if isinstance(connection, Passage) and now - self._at.confirmed > RELAY_LEASE:
                self._at.direct = True  # there is time to find another way before the ranks have to end
                connection.abort()
            if now - self._at.confirmed > LEASE and (connection is not None or self._at.running):
                await asyncio.sleep(_LOOK)  # an answer may have come while this process stood still
                if time.monotonic() - self._at.confirmed > LEASE:
                    self._cut_off(time.monotonic())

    def _tell(self, connection: Connection | Passage) -> None:
        """Tells the coordinator that the ranks have left their generation, and how many processes wait."""
        if self._left is not None and self._left.generation == self._at.running:
            ranks, holds = self._offer()
            cut_off = self._left.outcome == "lost" and self._cut[0] == self._at.running
            why = CUT_OFF if cut_off else self._left.message
            self._unsaved = why if self._left.outcome == "stopped" and self._left.code else ""
            connection.send(replace(self._left, ranks=ranks, holds=holds, message=why))
            self._at.running = 0
        self._left = None
        if self._ranks.ready != self._told:
            connection.send(Waiting(self._offer()[0]))

    def _tell_progress(self, connection: Connection | Passage) -> None:
        """Tells the coordinator how fast the ranks work, or that none comes further."""
        if (paces := self._ranks.paces) is not None:
            connection.send(paces)
        if self._ranks.stalled:
            connection.send(Stalled(self._at.running))

    def _cut_off(self, now: float) -> None:
        """Has the ranks leave, at first, and soon kills those that have not."""
        if self._at.running and self._cut[0] != self._at.running:
            self._cut = self._at.running, now
            self._say(f"no coordinator has answered for {LEASE:.0f} s: the ranks of this node leave their generation")
            self._ranks.leave(NOW)
        if now - self._cut[1] > self._leaving:
            self._ranks.kill()
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
