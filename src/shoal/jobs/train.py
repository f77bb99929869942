"""Trains a job, from the settled job to the finished run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal import units
from shoal.checkpoint.manifest import read_manifest
from shoal.comm import World
from shoal.data import save_tokenizer
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.jobs import resume
from shoal.jobs.assemble import make_engine
from shoal.jobs.attempt import Attempt, Speed
from shoal.jobs.automatic import planned
from shoal.jobs.changes import remembered
from shoal.jobs.choose import Settled, microbatches_of, settle, with_plan
from shoal.jobs.config import Job, Origins
from shoal.jobs.costs import flops_per_sample, peak_flops
from shoal.jobs.kernels import kernels
from shoal.jobs.lock import locked
from shoal.jobs.names import DIRECTORY, TOKENIZER
from shoal.jobs.outcome import Outcome
from shoal.jobs.plans import plan_at, plans_of
from shoal.jobs.trying import passing_over
from shoal.jobs.write import origin_table, write_resolved
from shoal.launch import join
from shoal.plan import Plan
from shoal.report.metrics import MembershipRecord
from shoal.toml import plan_text

log = logging.getLogger(__name__)


def train(job: Job, origins: Origins | None = None, world: World | None = None) -> Outcome:
    """Trains `job` on the ranks of `world` (default: from the launcher's variables). A collective call.

    Writes the run directory (see docs/design.md). SIGINT and SIGTERM end the run after the step in progress, with a
    checkpoint and the report. Raises the errors of the engine, after the report of the failed run is written.
    """
    world = world or join()
    settled = planned(settle(job, origins or {}, world), world)
    with locked(Path(settled.job.run.dir), world.everyone):
        cost = cost_of(settled) if world.rank == 0 else None
        return begin(settled, world).attempt(cost).to_its_end()


@dataclass(frozen=True)
class Begun:
    """A run that is ready to train, from its start or from a checkpoint.

    restored: the state it goes on from. said: warnings for its record. refused: see `passing_over`.
    """

    settled: Settled
    engine: Engine
    restored: resume.Restored
    said: list[str]
    refused: list[int]

    def attempt(self, cost: float | None, generation: MembershipRecord | None = None, **others: Any) -> Attempt:
        """Makes the attempt of all ranks. A collective call.

        cost: the FLOPs of a sample. generation: which this attempt is, where nodes come and go. others: for Attempt.
        """
        speed = Speed(cost, peak_flops(self.engine))
        attempt = Attempt(self.settled, self.engine, self.restored, about(self.settled), speed, **others)
        if generation is not None:
            attempt.recorder.membership(generation)
        if self.restored.where:
            attempt.recorder.note(self.restored.where)
        for line in self.said + self.restored.said + attempt.replanner.never(self.settled.total):
            attempt.recorder.warning(line)
        attempt.trying.say_refused(self.refused)
        return attempt


def about(settled: Settled) -> dict[str, Any]:
    """Returns the job as its checkpoints record it."""
    tokenizer = settled.tokenizer.fingerprint if settled.tokenizer else None
    return remembered(settled.job, tokenizer, settled.content, settled.classes)


def cost_of(settled: Settled) -> float | None:
    """Returns the FLOPs of a sample, where they can be found."""
    return flops_per_sample(settled.model, settled.model.prepare_data(settled.data.train), settled.job.data.sequence)


def plan_line(settled: Settled) -> str:
    """Says which plan the planner has found, and why."""
    return f"plan: {plan_text(settled.job.plan.to_dict())} ({settled.why})"


def begin(settled: Settled, world: World) -> Begun:
    """Makes the engine of a run, with the state of its checkpoint where it has one. A collective call."""
    checkpoint, said = resume.find(settled.job, about(settled), world.everyone)
    log.info("building the model")
    step = 0 if checkpoint is None else read_manifest(checkpoint).step
    update = resume.update_on_disk(settled.job, plans_of(settled.job, world.size), step, world.everyone)
    settled, engine, refused = _made(settled, step, update, world)
    engine.run = resume.run_name(settled.job)
    restored = resume.restore(settled.job, engine, checkpoint)
    if update is not None:
        if engine.step_index == step:
            said.append(update.lost(step, world.size))
        settled, _, more = passing_over(settled, partial(_go_to_its_plan, engine, world))
        refused += more
    make_directory(settled, world, engine)
    return Begun(settled, engine, restored, said, refused)


def _made(settled: Settled, step: int, update: resume.Update | None, world: World) -> tuple[Settled, Engine, list[int]]:
    """Returns the engine for a run that goes on after `step`, as `passing_over` does. Where there is an update that
    these ranks can read, it has the plan that this was made under: a refusal is of no plan that is to be tried."""

    def make(settled: Settled) -> Engine:
        plan = _plan_at(settled, step, world)
        with _of_another_plan(settled, plan, f"run.at, the plan after step {step}"):
            return make_engine(replace(settled.job, plan=plan), settled.model, settled.total, world)

    if update is None or update.ranks != world.size:
        return passing_over(settled, make)
    with _of_another_plan(settled, update.plan, update.refused(step)):
        job = replace(settled.job, plan=update.plan)
        return settled, make_engine(job, settled.model, settled.total, world), []


def _go_to_its_plan(engine: Engine, world: World, settled: Settled) -> None:
    """Has the engine go on under the plan of its step, where it has another one because of an update on a disk."""
    step = engine.step_index
    if (now := _plan_at(settled, step, world)) != engine.plan:
        with _of_another_plan(settled, now, f"run.at, the plan after step {step}"):
            engine.replan(now)


@contextmanager
def _of_another_plan(settled: Settled, plan: Plan, name: str) -> Iterator[None]:
    """Names a plan that is refused where it is not the one under which the run began."""
    try:
        yield
    except UserError as error:
        if plan == settled.job.plan:
            raise
        raise UserError(f"{name}: {error}") from error


def _plan_at(settled: Settled, step: int, world: World) -> Plan:
    """Returns the plan after `step` steps, with its stages found. A collective call."""
    plan = plan_at(settled.job, step, world.size)
    return plan if plan == settled.job.plan else with_plan(settled, plan, world).job.plan


def make_directory(settled: Settled, world: World, engine: Engine) -> None:
    """Makes the run directory on rank 0, writes resolved.toml and prints the values. A collective call."""
    problem = None
    run_dir = Path(settled.job.run.dir)
    if world.rank == 0:
        try:
            (run_dir / DIRECTORY).mkdir(parents=True, exist_ok=True)
            write_resolved(settled.job, settled.origins, run_dir, settled.trials)
            if settled.tokenizer is not None:
                save_tokenizer(settled.tokenizer, run_dir / TOKENIZER)
        except OSError as error:
            problem = UserError(f"the run directory {run_dir} cannot be written: {error}. Choose another run.dir")
        console = Console(file=sys.stdout, highlight=False)
        console.print(origin_table(settled.job, settled.origins))
        if settled.why:
            console.print(plan_line(settled), markup=False)
        console.print(kernels(engine), markup=False)
        if engine.parts.link is not None:
            chunks = f"{len(engine.parts.chunks)} chunks of about {units.size(engine.parts.chunk_bytes)}"
            console.print(f"gradients travel in {chunks} ({engine.parts.link})", markup=False)
        size, number = microbatches_of(settled.job)
        if settled.job.train.microbatch is None and number > 1:
            console.print(
                f"train.microbatch = {size}: {number} in a step keep the {engine.plan.pp} ranks of a pipeline busy"
            )
    problem = world.everyone.broadcast_object(problem)
    if problem is not None:
        raise problem
