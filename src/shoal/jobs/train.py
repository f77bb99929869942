"""Trains a job, from the settled job to the finished run."""

from __future__ import annotations

import logging
import math
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from shoal.checkpoint.manifest import read_manifest
from shoal.comm import World
from shoal.data import save_tokenizer
from shoal.device import hardware_name, is_accelerator
from shoal.elastic.told import told
from shoal.engine import Engine
from shoal.errors import CheckpointError, ShoalError, TrainingError, UserError
from shoal.jobs import resume
from shoal.jobs.assemble import make_engine
from shoal.jobs.changes import remembered
from shoal.jobs.choose import Settled, microbatches_of, settle, with_plan
from shoal.jobs.config import Job, Origins, describe
from shoal.jobs.costs import flops_per_sample, peak_flops
from shoal.jobs.evaluate import Subsample, can_write, measure_of, write_on
from shoal.jobs.generation import Shown, record_of, resuming
from shoal.jobs.kernels import kernels
from shoal.jobs.lock import locked
from shoal.jobs.moves import Moves
from shoal.jobs.names import DIRECTORY, TOKENIZER
from shoal.jobs.plans import plan_at, plans_of
from shoal.jobs.record import Recorder
from shoal.jobs.replan import Replanner
from shoal.jobs.save import Saver
from shoal.jobs.stop import Stop
from shoal.jobs.timeline import Recording
from shoal.jobs.write import origin_table, write_resolved
from shoal.launch import join
from shoal.plan import Plan
from shoal.report.events import FAILED
from shoal.report.metrics import RunRecord

log = logging.getLogger(__name__)

FIRST_LOOK = 64  # rows of the evaluation before the first step at most: untrained weights need no more for a good mean


@dataclass(frozen=True)
class Outcome:
    """The end of a run. `reason`: a sentence; `signal`: what stopped it, if one did; `report`: None but on rank 0."""

    run_dir: Path
    step: int
    reason: str
    signal: int | None
    report: Path | None


def train(job: Job, origins: Origins | None = None, world: World | None = None) -> Outcome:
    """Trains `job` on the ranks of `world` (default: from the launcher's variables). A collective call.

    Writes the run directory (see docs/design.md). SIGINT and SIGTERM end the run after the step in progress, with a
    checkpoint and the report. Raises the errors of the engine, after the report of the failed run is written.
    """
    world = world or join()
    settled = settle(resuming(job), origins or {}, world)
    with locked(Path(settled.job.run.dir), world.everyone):
        return _train(settled, world)


def _train(settled: Settled, world: World) -> Outcome:
    about = remembered(settled.job, settled.tokenizer.fingerprint if settled.tokenizer else None)
    checkpoint, said = resume.find(settled.job, about, world.everyone)
    log.info("building the model")
    step = 0 if checkpoint is None else read_manifest(checkpoint).step
    update = resume.update_on_disk(settled.job, plans_of(settled.job, world.size), step, world.everyone)
    begins, plan = step, _plan_at(settled, step, world)
    if update is not None and update.ranks == world.size:  # it is read under the plan that it was made under
        begins, plan = update.step, update.plan
    with _of_the_plan(settled, plan, begins):
        engine = make_engine(replace(settled.job, plan=plan), settled.model, settled.total, world)
    _make_directory(settled, world, engine)
    engine.run = resume.run_name(settled.job)
    restored = resume.restore(settled.job, engine, checkpoint)
    if update is not None and engine.step_index == step:
        said.append(update.lost(step, world.size))
    if update is not None and (now := _plan_at(settled, engine.step_index, world)) != plan:
        with _of_the_plan(settled, now, engine.step_index):
            engine.replan(now)
    run = _Run(settled, engine, restored, about)
    if (known := told()) is not None:
        run.recorder.membership(record_of(known, world.size, engine.step_index))
    if restored.where:
        run.recorder.note(restored.where)
    for line in said + restored.said + run.replanner.never(settled.total):
        run.recorder.warning(line)
    return run.to_its_end()


@contextmanager
def _of_the_plan(settled: Settled, plan: Plan, step: int) -> Iterator[None]:
    """Names the step in a refusal of a plan that is not the one under which the run began."""
    try:
        yield
    except UserError as error:
        if plan == settled.job.plan:
            raise
        raise UserError(f"run.at, the plan after step {step}: {error}") from error


def _plan_at(settled: Settled, step: int, world: World) -> Plan:
    """Returns the plan after `step` steps, with its stages found. A collective call."""
    plan = plan_at(settled.job, step, world.size)
    return plan if plan == settled.job.plan else with_plan(settled, plan, world).job.plan


def _make_directory(settled: Settled, world: World, engine: Engine) -> None:
    """Makes the run directory on rank 0, writes resolved.toml and prints the values. A collective call."""
    problem = None
    run_dir = Path(settled.job.run.dir)
    if world.rank == 0:
        try:
            (run_dir / DIRECTORY).mkdir(parents=True, exist_ok=True)
            write_resolved(settled.job, settled.origins, run_dir)
            if settled.tokenizer is not None:
                save_tokenizer(settled.tokenizer, run_dir / TOKENIZER)
        except OSError as error:
            problem = UserError(f"the run directory {run_dir} cannot be written: {error}. Choose another run.dir")
        console = Console(file=sys.stdout, highlight=False)
        console.print(origin_table(settled.job, settled.origins))
        console.print(kernels(engine), markup=False)
        if engine.parts.link is not None:
            mebibytes = engine.parts.chunk_bytes / 2**20
            chunks = f"{len(engine.parts.chunks)} chunks of about {mebibytes:.3g} MiB"
            console.print(f"gradients travel in {chunks} ({engine.parts.link})", markup=False)
        if settled.job.train.microbatch is None and engine.plan.pipelined:
            size, number = microbatches_of(settled.job)
            console.print(
                f"train.microbatch = {size}: {number} in a step keep the {engine.plan.pp} ranks of a pipeline busy"
            )
    problem = world.everyone.broadcast_object(problem)
    if problem is not None:
        raise problem


def write_report(run_dir: Path) -> Path:
    """Calls `report.page.write_report`. Imported here, because its libraries take half as long to import as torch."""
    from shoal.report import page

    return page.write_report(run_dir)


class _Run:
    """One attempt of a run, from its first record to its report. `about`: the job as checkpoints record it."""

    def __init__(self, settled: Settled, engine: Engine, restored: resume.Restored, about: Mapping[str, Any]) -> None:
        job, world = settled.job, engine.world
        seconds_before = restored.user.get("seconds", 0.0)
        self.settled, self.job, self.engine = settled, job, engine
        self.run_dir, self.first = Path(job.run.dir), world.rank == 0
        self.data = settled.model.prepare_data(settled.data.train)
        held_out = settled.data.validation
        self.held_out = (
            None if held_out is None else Subsample(settled.model.prepare_data(held_out), job.run.eval_samples)
        )
        cost = flops_per_sample(settled.model, self.data, job.data.sequence) if self.first else None
        self.recorder = Recorder(
            self.run_dir,
            job.run.trackers,
            active=self.first,
            device=engine.device,
            total=settled.total,
            flops_per_sample=cost,
            late=engine.parts.lag,
        )

        def user() -> dict[str, Any]:
            return {"seconds": seconds_before + self.stop.elapsed, "job": about}

        self.saver = Saver(engine, self.recorder, self.run_dir, job.run.keep, user, restored.saved)
        self.replanner = Replanner(settled, engine, self.recorder, self.saver)
        limit = None if job.train.seconds is None else job.train.seconds - seconds_before
        ahead = engine.parts.lag > 0 and not is_accelerator(world.device)
        group = world.group("stop", world.everyone.ranks) if ahead else world.everyone
        self.stop = Stop(group, limit, ahead, self.replanner.is_asked)
        self.timeline = Recording(engine, self.run_dir, engine.step_index, settled.total)
        self.moves, self.shown = Moves(engine), Shown(world)
        self.recorder.start(self._about(peak_flops(engine)))

    def to_its_end(self) -> Outcome:
        """Trains; writes the end record and the report, also where training fails."""
        try:
            with self.stop:
                reason = self._train()
                self.saver.save()
                self.saver.close()
                self.timeline.close(self.recorder)
            if self.saver.failure is not None:
                raise CheckpointError(f"{reason}, but the newest weights are not saved: {self.saver.failure}")
        except BaseException as error:
            if isinstance(error, TrainingError):
                self.saver.close()  # every rank raised it, so all of them can finish the save under way
            said = str(error) if isinstance(error, ShoalError) else type(error).__name__
            self._finish(f"{FAILED} {said}")
            raise
        return Outcome(self.run_dir, self.engine.step_index, reason, self.stop.signal, self._finish(reason))

    def _train(self) -> str:
        """Trains all steps, with the evaluations before, between and after them; returns why training ended."""
        engine, run, total = self.engine, self.job.run, self.settled.total
        if total is not None and engine.step_index >= total:
            return f"step {engine.step_index} of {total} was reached before: there is nothing left to train"
        if engine.step_index == 0:
            self._evaluate(FIRST_LOOK)
        log.info("the first step of this attempt")
        stopped = None
        for batch in engine.batches(self.data, steps=None if total is None else total - engine.step_index):
            self.timeline.before(batch.step)
            self.moves.before()
            result = engine.step(batch)
            self.recorder.step(result, len(batch.ids))
            if self.first and (moves := self.moves.after(batch)) is not None:
                self.recorder.moves(moves)
            step = engine.step_index
            self.shown.stepped(step)
            stopped = self.stop.after_step()
            if stopped or step == total:
                break
            if run.eval_every and step % run.eval_every == 0:
                self._evaluate_and_write()
            if run.save_every and step % run.save_every == 0:
                self.shown.busy()
                with self.recorder.pause():
                    self.saver.save()
            if self.replanner.is_due(self.stop.wanted):
                self.timeline.before(-1)
                self.shown.busy()
                with self.recorder.pause():
                    self.replanner.change(self.stop.wanted)
                self.moves = Moves(engine)
        self.timeline.before(-1)
        self.shown.busy()
        if self.stop.signal is None:
            self._evaluate_and_write()
        return stopped or f"all {total} steps were trained"

    def _evaluate_and_write(self) -> None:
        """Evaluates, and has the model continue the prompt `run.sample`."""
        self._evaluate()
        job, engine = self.job, self.engine
        if not (job.run.sample and can_write(self.settled.model.loss)):
            return
        assert self.settled.tokenizer is not None
        log.info("the model writes a sample")
        with self.recorder.pause():
            text = write_on(engine, self.settled.tokenizer, job.run.sample)
            self.recorder.sample(engine.step_index, job.run.sample, text)

    def _evaluate(self, most: int | None = None) -> None:
        if self.held_out is not None:
            log.info("evaluating")
            self.shown.busy()
            held_out = self.held_out if most is None else Subsample(self.held_out, min(most, len(self.held_out)))
            with self.recorder.pause():
                right = measure_of(self.settled.model.loss)
                found = self.engine.evaluate(held_out, also=() if right is None else (right,))
                self.recorder.evaluation(self.engine.step_index, found, found.also[0] if found.also else None)

    def _finish(self, reason: str) -> Path | None:
        """Writes the end record and the report. A full disk costs only the report."""
        self.recorder.end(reason)
        if not self.first:
            return None
        try:
            return write_report(self.run_dir)
        except OSError as error:
            print(f"warning: the report of {self.run_dir} cannot be written: {error}", file=sys.stderr)
            return None

    def _about(self, peak: float) -> RunRecord:
        world = self.engine.world
        return RunRecord(
            host=world.host,
            device=hardware_name(world.device) or f"CPU ({platform.machine()})",
            world=world.size,
            versions={"shoal": version("shoal"), "torch": torch.__version__, "python": platform.python_version()},
            parameters=sum(math.prod(layout.shape) for layout in self.engine.layouts.values()),
            peak_flops=peak,
            config=describe(self.job, self.settled.origins),
            total=self.settled.total,
            time=time.time(),
        )
