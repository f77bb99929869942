"""An attempt of a run: from its first record to its report, or to the end of its generation."""

from __future__ import annotations

import logging
import math
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.device import hardware_name, is_accelerator
from shoal.elastic.events import NOW, SAVE
from shoal.engine import Engine
from shoal.errors import CheckpointError, CorruptionError, ShoalError, TrainingError, counted_from_1
from shoal.jobs import resume
from shoal.jobs.applied import Applied
from shoal.jobs.batches import Votes, batches
from shoal.jobs.choose import Settled
from shoal.jobs.config import describe
from shoal.jobs.evaluate import Subsample, measure_of, write_on
from shoal.jobs.generation import Shown
from shoal.jobs.moves import Moves
from shoal.jobs.outcome import Outcome, report_on
from shoal.jobs.pace import OwnPace
from shoal.jobs.plans import forget
from shoal.jobs.record import Recorder
from shoal.jobs.replan import Replanner
from shoal.jobs.save import Saver
from shoal.jobs.stop import Halted, Stop
from shoal.jobs.timeline import Recording
from shoal.jobs.trying import Trying
from shoal.report.events import FAILED
from shoal.report.metrics import RunRecord
from shoal.report.versions import versions

log = logging.getLogger(__name__)

FIRST_LOOK = 64  # rows of the evaluation before the first step at most: untrained weights need no more for a good mean


@dataclass(frozen=True)
class Speed:
    """What MFU needs: the FLOPs of a sample, where known, and the peak FLOP/s of all ranks."""

    flops_per_sample: float | None
    peak: float


class Attempt:
    """An attempt of a run.

    about: the job as checkpoints record it.
    evaluated: the last step that was evaluated, where this attempt goes on in the middle of a run in memory; else None.
    has_lost: whether an error shows that other ranks are gone, and this one goes on in another generation; None where
        there is no other one.
    """

    def __init__(
        self,
        settled: Settled,
        engine: Engine,
        restored: resume.Restored,
        about: Mapping[str, Any],
        speed: Speed,
        evaluated: int | None = None,
        has_lost: Callable[[BaseException], bool] | None = None,
    ) -> None:
        job, world = settled.job, engine.world
        self._seconds_before = restored.user.get("seconds", 0.0)
        self._evaluated, self._has_lost, self._ended = evaluated, has_lost, 0.0
        ahead = engine.parts.lag > 0 and not is_accelerator(world.device)
        group = world.group("stop", world.everyone.ranks) if ahead else world.everyone
        self.settled, self.job, self.engine = settled, job, engine
        self.run_dir, self.first = Path(job.run.dir), world.rank == 0
        self.data = settled.model.prepare_data(settled.data.train)
        whole = settled.data.validation
        self.held_out = None if whole is None else Subsample(settled.model.prepare_data(whole), job.run.eval_samples)
        self.recorder = Recorder(
            self.run_dir,
            job.run.trackers,
            active=self.first,
            device=engine.device,
            total=settled.total,
            flops_per_sample=speed.flops_per_sample,
            late=engine.parts.lag,
        )

        def user() -> dict[str, Any]:
            return {"seconds": self.seconds, "job": about}

        self.votes = Votes(engine, job.run.verify_every, self.recorder.warning)
        self.saver = Saver(engine, self.recorder, self.run_dir, job.run.keep, user, restored.saved, self.votes.take)
        self.replanner = Replanner(settled, engine, self.recorder, self.saver)
        self.trying = Trying(settled, engine, self.recorder, self.saver)
        limit = None if job.train.seconds is None else job.train.seconds - self._seconds_before
        self.stop = Stop(group, limit, ahead, self.replanner.is_asked, heeds=has_lost is None)
        self.timeline = Recording(engine, self.run_dir, engine.step_index, settled.total)
        self.applied = Applied(engine)
        self.moves, self.pace, self.shown = Moves(engine), OwnPace(engine), Shown(world, job.run.first_within)
        self.recorder.start(self._about(speed.peak))

    @property
    def seconds(self) -> float:
        """How long this run has trained, with the attempts before."""
        return self._ended or float(self._seconds_before + self.stop.elapsed)

    def to_its_end(self) -> Outcome:
        """Trains; writes the end record and the report, also where training fails. Raises Halted where the run goes on
        in another generation."""
        try:
            with self.stop, counted_from_1():
                reason = self._train()
                self.shown.busy()
                self.trying.pause()
                self.saver.save()
                self.saver.close()
                self.timeline.close(self.recorder)
            if self.saver.failure is not None:
                raise CheckpointError(f"{reason}, but the newest weights are not saved: {self.saver.failure}")
            if self.stop.signal is None:
                self.applied.check(reason)
        except Halted as halted:
            self._hand_on(halted.how)
            raise
        except BaseException as error:
            if self._has_lost is not None and self._has_lost(error):
                self._abandon()
                raise Halted(NOW) from error
            if isinstance(error, TrainingError) or (isinstance(error, CorruptionError) and self._has_lost is None):
                self.saver.close()  # every rank raised it, so all of them can finish the save under way
            said = str(error) if isinstance(error, ShoalError) else type(error).__name__
            if unwritten := self._finish(f"{FAILED} {said}")[1]:
                print(f"warning: {unwritten}", file=sys.stderr)
            raise
        return Outcome(self.run_dir, self.engine.step_index, reason, self.stop.signal, *self._finish(reason))

    def leave(self, how: str) -> None:
        """Has this rank leave its generation; see events.NOW. Any thread may call it."""
        self.stop.ask(how)
        if how == NOW:
            self.engine.give_up()

    def _hand_on(self, how: str) -> None:
        """Ends this attempt after a step, on all ranks alike. What would be lost with a rank is saved."""
        self.timeline.before(-1)
        self.shown.busy()
        self.stop.abandon()
        self.trying.pause()
        if how == SAVE or self.engine.why_not_regroup():
            self.saver.save(wait=True)
        self.timeline.close(self.recorder)
        self._abandon()

    def _abandon(self) -> None:
        """Ends this attempt on this rank alone. The engine keeps its state."""
        self._ended = self.seconds
        self.timeline.cut_short()
        self.engine.abandon()
        self.stop.abandon()
        self.recorder.close()
        self.shown.close()

    def _train(self) -> str:
        """Trains all steps, with the evaluations before, between and after them; returns why training ended."""
        engine, run, total = self.engine, self.job.run, self.settled.total
        if self._evaluated is not None:
            self._catch_up(self._evaluated)
        if total is not None and engine.step_index >= total and self._evaluated is None:
            return f"step {engine.step_index} of {total} was reached before: there is nothing left to train"
        if (over := self.stop.was_over) and self._evaluated is None:
            return over
        if engine.step_index == 0 and self._evaluated != 0:
            self._evaluate(FIRST_LOOK)
        log.info("the first step of this attempt")
        self.shown.begins()
        stopped = None
        for batch in batches(engine, self.data, total, self.votes):
            self.timeline.before(batch.step)
            self.moves.before()
            with self.pace.step(batch):
                result = engine.step(batch)
            self.timeline.ended()
            self.applied.last = result
            self.recorder.step(result, len(batch.ids))
            self.timeline.tell(self.recorder)
            self.trying.after(result)
            if self.first and (moves := self.moves.after(batch)) is not None:
                self.recorder.moves(moves)
            step = engine.step_index
            self.shown.stepped(step)
            self.shown.pace(self.pace)
            stopped = self.stop.after_step()
            if stopped or step == total:
                break
            if run.eval_every and step % run.eval_every == 0:
                self._evaluate_and_write()
            if run.save_every and step % run.save_every == 0:
                self._save()
            if self.replanner.is_due(self.stop.wanted):
                self._change_plan(lambda: self.replanner.change(self.stop.wanted))
                self.trying.stop_if_changed()
            if self.trying.is_due:
                self._change_plan(self.trying.change)
        self.timeline.before(-1)
        if self.stop.signal is None:
            self._evaluate_and_write()
        return self.applied.why_ended(stopped, total)

    def _change_plan(self, change: Callable[[], None]) -> None:
        self.timeline.before(-1)
        self.shown.busy()
        with self.recorder.pause():
            change()
        self.moves, self.pace = Moves(self.engine), OwnPace(self.engine)
        self.timeline.changed(self.engine.step_index)
        self.shown.begins()

    def _catch_up(self, evaluated: int) -> None:
        """Does what was due after the last step, if the generation before did not come to its end."""
        run, step = self.job.run, self.engine.step_index
        if run.eval_every and step and step % run.eval_every == 0 and evaluated < step != self.settled.total:
            self._evaluate_and_write()
        if run.save_every and step % run.save_every == 0:
            self._save()

    def _save(self) -> None:
        self.shown.saves(self.engine.saving)
        with self.recorder.pause():
            self.saver.save()

    def _evaluate_and_write(self) -> None:
        """Evaluates, and has the model continue the prompt `run.sample`."""
        self._evaluate()
        job, engine = self.job, self.engine
        if not job.run.sample:
            self.shown.trains()
            return
        assert self.settled.tokenizer is not None
        log.info("the model writes a sample")
        self.shown.writes()
        with self.recorder.pause():
            text = write_on(engine, self.settled.tokenizer, job.run.sample)
            self.recorder.sample(engine.step_index, job.run.sample, text)

    def _evaluate(self, most: int | None = None) -> None:
        if self.held_out is not None:
            log.info("evaluating")
            self.shown.evaluates()
            held_out = self.held_out if most is None else Subsample(self.held_out, min(most, len(self.held_out)))
            with self.recorder.pause():
                right = measure_of(self.settled.model.loss)
                also = () if right is None else (right,)
                found = self.engine.evaluate(held_out, also=also, progress=lambda done, of: self.shown.evaluates())
                self.recorder.evaluation(self.engine.step_index, found, found.also[0] if found.also else None)
            self.shown.busy()

    def _finish(self, reason: str) -> tuple[Path | None, str]:
        """Writes the end record and the report; see `report_on`. A full disk costs only the report."""
        self.recorder.end(reason)
        if not self.first:
            return None, ""
        with suppress(OSError):  # where nothing can be removed the report cannot be written either, which is said
            forget(self.run_dir)
        return report_on(self.run_dir)

    def _about(self, peak: float) -> RunRecord:
        world = self.engine.world
        return RunRecord(
            host=world.host,
            device=hardware_name(world.device) or f"CPU ({platform.machine()})",
            world=world.size,
            versions=versions(),
            parameters=sum(math.prod(layout.shape) for layout in self.engine.layouts.values()),
            peak_flops=peak,
            config=describe(self.job, self.settled.origins),
            total=self.settled.total,
            time=time.time(),
            threads=torch.get_num_threads(),
            on_host=world.on_host,
        )
