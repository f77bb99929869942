"""Supervisors in one process, with real sockets on loopback and ranks that only pretend."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.comm.signed import derived
from shoal.elastic.etcd import Etcd, parse
from shoal.elastic.etcd_election import EtcdElection
from shoal.elastic.events import FOR_GOOD, NOW, Limits
from shoal.elastic.journal import Journal, written
from shoal.elastic.leadership import Leadership, Node
from shoal.elastic.messages import Admitted, Paces, Report, Start
from shoal.elastic.supervisor import Supervisor

KEY = derived(b"the secret of these tests", "coordinator")
JOB = Admitted("", 0, ["train.py"], "/", "/", "", "", 1, 8)


class Pretended:
    """Ranks of a generation that leave it when they are told to, or when a test says so."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.ended: Report | None = None
        self.holds = False

    def end(self, outcome: str, code: int = 0, step: int = -1, message: str = "", holds: bool = False) -> None:
        self.holds = holds
        self.ended = self.ended or Report(self.start.generation, outcome, code, step, message, 0, holds)


class Crew:
    """As many processes as `member` has ranks, ready at once, which only pretend."""

    def __init__(self, member: Member) -> None:
        self._member, self._begun, self.holds = member, False, False
        self._now: Pretended | None = None

    @property
    def busy(self) -> bool:
        return self._now is not None

    @property
    def ready(self) -> int:
        return self._member.ranks if self._begun and not self.busy else 0

    @property
    def paces(self) -> Paces | None:
        return self._member.paces(self._now.start) if self._now is not None else None

    @property
    def stalled(self) -> bool:
        return self._now is not None and self._member.stalled(self._now.start)

    def begin(self, job: Admitted) -> None:
        self._begun = True

    def place(self, start: Start) -> None:
        assert start.ranks == self._member.ranks and not self.busy
        self._now = self._member.start(start)

    def look(self) -> Report | None:
        if self._now is None or self._now.ended is None:
            return None
        ended, self._now = self._now, None
        self.holds = ended.holds
        return ended.ended

    def leave(self, how: str) -> None:
        if self._now is not None:
            asked = how != NOW
            self._now.end(
                "stopped" if asked else "lost", step=10 * self._now.start.generation, holds=how not in FOR_GOOD
            )

    def give_up(self) -> None:
        if self._now is not None and self.stalled:
            self._now.end("killed", 1, message="stalled", holds=True)

    def kill(self) -> None:
        if self._now is not None:
            self._now.end("lost")

    def close(self) -> None:
        self.kill()


@dataclass
class Member:
    """A supervisor, all that its ranks were started for, and what it said."""

    name: str
    ranks: int = 1
    starts: list[Pretended] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    open_store: Callable[[str], int] = lambda host: 1
    paces: Callable[[Start], Paces | None] = lambda start: None
    stalled: Callable[[Start], bool] = lambda start: False
    limits: Limits = field(default_factory=lambda: Limits(settle=0.1))
    journals: Path | None = None

    def __post_init__(self) -> None:
        self.node = Node(
            self.name,
            secrets.token_hex(8),
            KEY,
            self.open_store,
            lambda program, size: [f"size={size}"],
            lambda job, lines: Journal(self.journals / f"{self.name}.journal" if self.journals else None, lines),
            lambda job: written(self.journals) if self.journals else [],
            lambda job: None,
            self.said.append,
        )
        self.at = Leadership(self.node)
        self.supervisor = Supervisor(self.node, self.at, Crew(self))
        self.task: asyncio.Task[int] | None = None

    def start(self, start: Start) -> Pretended:
        self.starts.append(Pretended(start))
        return self.starts[-1]

    def lead(self, limits: Limits | None = None) -> Member:
        self.limits = limits or self.limits
        self.at.lead("127.0.0.1", JOB, self.limits)
        self.task = asyncio.create_task(self.supervisor.run())
        return self

    def by_etcd(self, url: str, key: bytes = KEY, run_dir: str = "/", **limits: float) -> Member:
        """Has it found or join the job of an etcd cluster once `run` is called."""
        election = EtcdElection(Etcd(parse(url, {})), key, run_dir, Limits(**{"settle": 0.1, **limits}))
        self.at = Leadership(self.node, election)
        self.supervisor = Supervisor(self.node, self.at, Crew(self))
        self.at.listen("127.0.0.1")
        self.at.stand(JOB)
        return self

    def run(self) -> Member:
        self.task = asyncio.create_task(self.supervisor.run())
        return self

    def join(self, other: Member) -> Member:
        """Joins the job of another member, and follows its journal by the same times, as nodes do."""
        self.limits, begin = other.limits, self.at.succession.begin
        self.at.succession.begin = lambda limits: begin(replace(limits, settle=self.limits.settle))
        self.at.follow([other.at.address])
        self.task = asyncio.create_task(self.supervisor.run())
        return self

    async def die(self) -> None:
        """Ends as a process that is killed: at once, with all its connections and its port."""
        door, coordinating = self.at._door, self.at._coordinating
        assert self.task is not None
        for task in filter(None, (self.task, coordinating)):
            task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        if door is not None:
            await door.close()

    @property
    def runs(self) -> Start | None:
        """What its ranks run, None where they do not."""
        return self.starts[-1].start if self.starts and self.starts[-1].ended is None else None


async def until(condition: Callable[[], object], seconds: float = 10.0) -> float:
    """Waits until `condition` is true; returns the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not come true"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


async def close(*members: Member) -> None:
    for member in members:
        if member.task is not None and not member.task.done():
            with suppress(Exception):
                await member.die()


def generation(*members: Member) -> int:
    """The generation that the ranks of all `members`, and of no others, run; 0 for none."""
    runs = [member.runs for member in members]
    numbers = {start.generation for start in runs if start is not None}
    whole = None not in runs and len(numbers) == 1 and all(start.nodes == len(members) for start in runs if start)
    return numbers.pop() if whole else 0
