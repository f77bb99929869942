"""What a run shows of itself while it trains: its folder is read again and again, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shoal.chaos.nodes import Cluster
from shoal.elastic.events import Draining, Ended, Left, Slow, TookOver
from shoal.elastic.journal import read
from shoal.errors import LaunchError
from shoal.jobs.stop import STOPPED
from shoal.report.events import FAILED
from shoal.report.follow import Follower
from shoal.report.metrics import EndRecord, MembershipRecord, Record, StepRecord, read_metrics

_LOOK = 0.005
PATIENCE = 120.0
"""Seconds in which a run is to come further, whatever has happened to it."""


class Over(Exception):
    """The run has ended before what was waited for came."""


@dataclass(frozen=True)
class Moment:
    """How far a run was at a moment.

    time: Unix time.
    step: the newest committed step.
    generation: the newest that has begun to train.
    records: how many there were.
    """

    time: float
    step: int
    generation: int
    records: int


class Watch:
    """Watches the run of `cluster`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._follower = Follower(cluster.run_dir / "metrics.jsonl")
        self._seen = 0
        self.step = self.generation = self.nodes = 0
        """The newest committed step, the newest generation that has begun to train, and its number of nodes."""
        self.trains = False
        """Whether that generation has committed a step."""
        self.over = False

    def look(self) -> None:
        """Takes in what the run has recorded since."""
        self._follower.read()
        for record in self._follower.records[self._seen :]:
            if isinstance(record, StepRecord):
                self.step, self.trains = max(self.step, record.step), True
            elif isinstance(record, MembershipRecord):
                self.generation, self.nodes, self.trains = record.generation, record.nodes, False
            elif isinstance(record, EndRecord):
                self.over = not record.reason.startswith((FAILED, STOPPED))
        self._seen = len(self._follower.records)

    def now(self) -> Moment:
        """Returns how far the run is now."""
        self.look()
        return Moment(time.time(), self.step, self.generation, self._seen)

    def wait(self, condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
        """Waits until `condition` is true. Raises Over where the run ends before, LaunchError after `seconds` in which
        it has recorded nothing."""
        deadline, seen = time.monotonic() + seconds, self._seen
        while True:
            self.look()
            if condition():
                return
            if self._seen != seen:
                deadline, seen = time.monotonic() + seconds, self._seen
            if self.over or not self._cluster.living:
                raise Over
            if time.monotonic() > deadline:
                said = "\n".join(line for node in self._cluster.nodes for line in node.said.splitlines()[-5:])
                raise LaunchError(f"for {seconds:.0f} s {what} (step {self.step}). What the nodes said last:\n{said}")
            time.sleep(_LOOK)

    def next_step(self, since: Moment, another: bool) -> StepRecord | None:
        """Returns the first step beyond those of that moment; None where there is none yet.

        another: only one that a later generation has committed.
        """
        generation, least = since.generation, since.generation if another else -1
        for record in self._follower.records[since.records :]:
            if isinstance(record, MembershipRecord):
                generation = record.generation
            elif isinstance(record, StepRecord) and record.step > since.step and generation > least:
                return record
        return None

    @property
    def records(self) -> Sequence[Record]:
        """All that the run has recorded so far."""
        return self._follower.records

    def stall(self, since: Moment) -> float:
        """Returns the longest time between two steps since that moment, in seconds."""
        times = [since.time, *(each.time for each in self.records[since.records :] if isinstance(each, StepRecord))]
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)

    def lost(self, since: Moment) -> int:
        """Returns how many committed steps were trained again since that moment."""
        later = self._follower.records[since.records :]
        return sum(record.lost for record in later if isinstance(record, MembershipRecord))

    def noticed(self, since: Moment) -> float | None:
        """Returns the Unix time at which the coordinator has first heard of something since that moment."""
        times = [
            event.time
            for path in (self._cluster.run_dir / "membership").glob("*.journal")
            for event in read(path)
            if isinstance(event, Left | Ended | Draining | Slow | TookOver) and event.time >= since.time
        ]
        return min(times, default=None)


def steps_of(run_dir: Path) -> list[StepRecord]:
    """Returns the committed steps of a run, each once, as its last attempt has them."""
    return list(read_metrics(run_dir / "metrics.jsonl").steps)
