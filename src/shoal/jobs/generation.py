"""How a rank goes on in its generation, where the nodes of its job come and go (see docs/elastic.md), and what it shows
its supervisor."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from shoal.checkpoint.directory import completed
from shoal.comm import World
from shoal.elastic.told import Told, told
from shoal.jobs.config import Job
from shoal.jobs.names import DIRECTORY
from shoal.launch.board import open_board
from shoal.report.metrics import MembershipRecord


def record_of(known: Told, world: int, step: int) -> MembershipRecord:
    """Returns the record of a generation, which goes on after `step` with `world` ranks."""
    lost = max(0, known.step - step)
    return MembershipRecord(
        step=step, generation=known.generation, nodes=known.nodes, world=world, why=known.why, lost=lost,
        events=known.events,
    )  # fmt: skip


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
