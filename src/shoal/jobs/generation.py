"""How a rank goes on in its generation, where the nodes of its job come and go (see docs/elastic.md), and what it shows
its supervisor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.checkpoint.directory import completed
from shoal.comm import World
from shoal.elastic.control import Place
from shoal.jobs.choose import Settled
from shoal.jobs.config import Auto, Job
from shoal.jobs.names import DIRECTORY
from shoal.jobs.pace import OwnPace
from shoal.jobs.ranks import ASKED
from shoal.jobs.read import load_job
from shoal.launch.board import BUSY, EVALUATION, FIRST, SAMPLE, SAVE, STEP, open_board
from shoal.report.metrics import MembershipRecord, StepRecord, last_recorded


def record_of(place: Place, step: int, *events: str) -> MembershipRecord:
    """Returns the record of a generation, which goes on after `step`; `events`: what has happened besides."""
    lost = max(0, place.step - step)
    return MembershipRecord(
        step=step, generation=place.generation, nodes=place.nodes, world=place.size, why=place.why, lost=lost,
        events=[*place.events, *events],
    )  # fmt: skip


def resuming(job: Job, generation: int) -> Job:
    """Returns the job, which goes on from its own checkpoints where it has any in a later generation."""
    if generation == 1:
        return job
    if job.run.resume not in ("auto", "never") and not completed(Path(job.run.dir) / DIRECTORY):
        return job
    return replace(job, run=replace(job.run, resume="auto"))


def placed(settled: Settled, path: str, assignments: list[str], place: Place) -> Settled:
    """Returns the job with the plan of its generation; where that is given the planner is not asked. `assignments`:
    those of all generations."""
    job, origins = load_job(path, [*assignments, *place.args])
    auto = Auto(open=True) if place.args and ASKED not in place.args and job.auto.wanted else job.auto
    train = replace(settled.job.train, microbatch=job.train.microbatch)
    job = resuming(replace(settled.job, plan=job.plan, train=train, auto=auto), place.generation)
    origins = {key: value for key, value in origins.items() if key.startswith("plan.")}
    if train.microbatch != settled.job.train.microbatch:
        origins["train.microbatch"] = "planner"  # which chose it for the plan that was changed
    return replace(settled, job=job, origins={**settled.origins, **origins})


def on_disk(run_dir: Path) -> list[int]:
    """Returns the last steps of a run that are saved, recorded and evaluated."""
    steps = [step for step, _ in completed(run_dir / DIRECTORY)]
    return [max(steps, default=0), *last_recorded(run_dir / "metrics.jsonl")]


def missing(recent: Sequence[Sequence[dict[str, Any]]], recorded: int, step: int) -> list[StepRecord]:
    """Returns the records of the steps up to `step` that nobody has recorded, of those that ranks remember."""
    known = {each["step"]: each for one in recent for each in one if recorded < each["step"] <= step}
    return [StepRecord(**known[number]) for number in sorted(known)]


class Shown:
    """The progress that this rank shows its supervisor; nothing where it has none. `first_within`: of the job's Run."""

    def __init__(self, world: World, first_within: float) -> None:
        self._board = open_board(os.environ, world.waiting, first_within)

    def begins(self) -> None:
        """Shows that the first step begins, of the generation or under a plan: it may compile, and read for long."""
        if self._board is not None:
            self._board.show(FIRST)

    def stepped(self, step: int) -> None:
        """Shows a committed step."""
        if self._board is not None:
            self._board.show(STEP, step)

    def evaluates(self) -> None:
        """Shows that an evaluation begins, or comes further."""
        if self._board is not None:
            self._board.show(EVALUATION)

    def trains(self) -> None:
        """Shows that the next step begins after something else."""
        if self._board is not None:
            self._board.show(STEP)

    def saves(self, waits: bool) -> None:
        """Shows that a save begins, and then the next step. `waits`: first of all the one before is to be completed,
        which nobody has timed."""
        if self._board is not None:
            self._board.show(SAVE, timed=not waits)

    def writes(self) -> None:
        """Shows that the model begins to write a sample, and then the next step."""
        if self._board is not None:
            self._board.show(SAMPLE)

    def pace(self, own: OwnPace) -> None:
        """Shows how long this rank's own work takes, where that is known."""
        if self._board is not None and own.seconds:
            self._board.pace(own.part, own.seconds, own.best)

    def busy(self) -> None:
        """Shows that something else begins, which may take long."""
        if self._board is not None:
            self._board.show(BUSY)

    def close(self) -> None:
        """Shows nothing more."""
        if self._board is not None:
            self._board.show(BUSY)
            self._board.close()
            self._board = None
