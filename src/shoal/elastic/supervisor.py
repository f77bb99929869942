"""A node's supervisor: a member of the job that starts, watches and ends the ranks of its host.

    the coordinator (here or on another node) <--messages--> supervisor --> ranks

It ends its ranks when the coordinator says so, and by itself when no beat has been answered for LEASE seconds: then it
may have been cut off, and the others go on without it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from signal import SIGTERM
from typing import Any, Protocol

from shoal.elastic.connection import Connection
from shoal.elastic.events import StepDown
from shoal.elastic.leadership import Leadership, Node
from shoal.elastic.liveness import BEAT, LEASE
from shoal.elastic.messages import (
    Admitted,
    Beat,
    End,
    Entry,
    Heard,
    Held,
    Note,
    Over,
    Released,
    Report,
    Roster,
    Start,
)
from shoal.elastic.records import Malformed
from shoal.elastic.succession import Candidate
from shoal.errors import LaunchError

_LOOK = 0.02


class Ranks(Protocol):
    """The ranks of a host in one generation."""

    def look(self) -> Report | None:
        """Returns how the ranks have ended, once all have; notices ranks that hang."""

    def stop(self) -> None:
        """Asks the ranks to end at a step boundary."""

    def kill(self) -> None:
        """Ends the ranks at once; does not wait."""


class Supervisor:
    """Supervises a node whose way to the coordinator is `leadership`.

    start: starts the ranks of a generation. Raises LaunchError.
    """

    def __init__(self, node: Node, leadership: Leadership, start: Callable[[Admitted, Start], Ranks]) -> None:
        self._say, self._at, self._start_ranks = node.say, leadership, start
        self._job: Admitted | None = None
        self._ranks: Ranks | None = None
        self._connection: Connection | None = None
        self._beats: dict[int, float] = {}
        self._wishes: list[Any] = []
        self._code: int | None = None

    def wish(self, message: Any) -> None:
        """Has the coordinator told that this node wants to leave (Drain) or that the job is to end (Ask)."""
        self._wishes.append(message)

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
            await self._end_ranks()
            await self._at.close()

    async def _stay(self) -> None:
        """Is a member until the job is over for this node."""
        while self._code is None:
            connection, job = await self._at.connect()
            if self._at.running and job.generation != self._at.running:
                self._say(f"generation {self._at.running} is over: its ranks are ended")
                self._at.running = 0
                await self._end_ranks()
            self._job, self._connection = job, connection
            try:
                while self._code is None and self._connection is connection:
                    await self._obey(connection, await connection.receive())
            except Malformed as error:
                self._say(f"the coordinator was hung up on: it sent {error}")
            except OSError:
                self._connection = None  # who coordinates now is found out next
            finally:
                self._connection = None
                connection.abort()
            if self._code is None and isinstance(end := await self._at.ended(), StepDown):
                self._say(f"this node stops: {end.why}. It looks for the others")
                self._at.running = 0
                await self._end_ranks()

    async def _end_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.kill()
        while self._ranks is not None and self._ranks.look() is None:
            await asyncio.sleep(_LOOK)
        self._ranks = None

    async def _obey(self, connection: Connection, message: Any) -> None:
        succession = self._at.succession
        if isinstance(message, Heard):
            self._at.confirmed = max(self._at.confirmed, self._beats.pop(message.number, 0.0))
        elif isinstance(message, Start):
            await self._end_ranks()
            self._start(connection, message)
        elif isinstance(message, End):
            self._end(connection, message)
        elif isinstance(message, Entry):
            connection.send(Held(succession.take(message.line)))
        elif isinstance(message, Roster):
            try:
                succession.learn([Candidate.read(each) for each in message.candidates])
            except ValueError as error:
                raise Malformed(f"a roster {message.candidates!r:.200}: {error}") from None
        elif isinstance(message, Note):
            self._say(message.text)
        elif isinstance(message, Released):
            self._code = 128 + SIGTERM
        elif isinstance(message, Over):
            self._code = message.code
            self._say(f"the job has ended: {message.why}")

    def _start(self, connection: Connection, start: Start) -> None:
        assert self._job is not None
        self._at.running = self._at.newest = start.generation
        try:
            self._ranks = self._start_ranks(self._job, start)
        except LaunchError as error:
            self._at.running = 0
            connection.send(Report(start.generation, "failed", 1, -1, str(error)))

    def _end(self, connection: Connection, end: End) -> None:
        if self._ranks is None or end.generation != self._at.running:
            connection.send(Report(end.generation, "stopped", 0, -1, "no rank ran"))
        elif end.drain:
            self._ranks.stop()
        else:
            self._ranks.kill()

    async def _tick(self) -> None:
        """Beats, looks after the ranks, and ends them where this node may have been cut off."""
        number, next_beat = 0, 0.0
        while True:
            await asyncio.sleep(_LOOK)
            now, connection = time.monotonic(), self._connection
            if connection is not None and now >= next_beat:
                number, next_beat = number + 1, now + BEAT
                self._beats[number] = now
                connection.send(Beat(number))
            while connection is not None and self._wishes:
                connection.send(self._wishes.pop(0))
            if self._ranks is not None and (report := self._ranks.look()) is not None and connection is not None:
                self._ranks = None
                if report.generation == self._at.running:
                    connection.send(report)
                    self._at.running = 0
            if now - self._at.confirmed > LEASE and (connection is not None or self._at.running):
                await asyncio.sleep(_LOOK)  # an answer may have come while this process stood still
                if time.monotonic() - self._at.confirmed > LEASE:
                    self._cut_off()

    def _cut_off(self) -> None:
        if self._at.running:
            self._say(f"no coordinator has answered for {LEASE:.0f} s: the ranks of this node are ended")
            self._at.running = 0
            if self._ranks is not None:
                self._ranks.kill()
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
