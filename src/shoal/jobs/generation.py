"""What a rank knows of its generation, where the nodes of its job come and go (see docs/elastic.md), and what it shows
its supervisor."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.checkpoint.directory import completed
from shoal.comm import World
from shoal.jobs.config import Job
from shoal.jobs.save import DIRECTORY
from shoal.launch.board import open_board
from shoal.report.metrics import MembershipRecord

VARIABLE = "SHOAL_MEMBERSHIP"


@dataclass(frozen=True)
class Told:
    """What the supervisor has told: the job's id, the number of the generation and of its nodes, why it was formed, the
    last step that the one before committed (-1 if not known), and what has happened since that was formed."""

    job: str
    generation: int
    nodes: int
    why: str
    step: int
    events: list[str]

    def record(self, world: int, step: int) -> MembershipRecord:
        """Returns the record of this generation, which goes on after `step` with `world` ranks."""
        lost = max(0, self.step - step)
        return MembershipRecord(
            step=step, generation=self.generation, nodes=self.nodes, world=world, why=self.why, lost=lost,
            events=self.events,
        )  # fmt: skip


def told(environ: Mapping[str, str] = os.environ) -> Told | None:
    """Returns what the supervisor has told this rank; None where nodes do not come and go."""
    return Told(**json.loads(environ[VARIABLE])) if VARIABLE in environ else None


def resuming(job: Job) -> Job:
    """Returns the job, which goes on from its own checkpoints where it has any in a later generation."""
    known = told()
    if known is None or known.generation == 1:
        return job
    if job.run.resume not in ("auto", "never") and not completed(Path(job.run.dir) / DIRECTORY):
        return job
    return replace(job, run=replace(job.run, resume="auto"))


class Shown:
    """The progress that this rank shows its supervisor; nothing where it has none."""

    def __init__(self, world: World) -> None:
        self._board = open_board(os.environ, world.waiting)

    def stepped(self, step: int) -> None:
        """Shows a committed step."""
        if self._board is not None:
            self._board.show(True, step)

    def busy(self) -> None:
        """Shows that something else than a step begins, which may take long."""
        if self._board is not None:
            self._board.show(False)
