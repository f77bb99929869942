"""Tries plans in the run itself: a few steps under each, all of which count, then the fastest stays."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

from shoal.device import is_accelerator
from shoal.engine import Engine
from shoal.errors import StorageError, UserError
from shoal.jobs import trials as kept
from shoal.jobs.choose import Settled, under
from shoal.jobs.record import Recorder
from shoal.jobs.replan import go_on_under
from shoal.jobs.save import Saver
from shoal.jobs.trials import Candidate, Trials
from shoal.jobs.write import keep_resolved
from shoal.plan import Plan
from shoal.report.metrics import TriedRecord
from shoal.training.result import StepResult

Made = TypeVar("Made")

STEPS = 4
"""Steps under a candidate, without those that loss scaling skips. The first, which agrees on names and records uses, is
not measured."""


def passing_over(settled: Settled, make: Callable[[Settled], Made]) -> tuple[Settled, Made, list[int]]:
    """Returns what `make` makes of a job, which begins under the plan to try next; those that it refuses are passed
    over, as the trials of the job that is returned say, and their numbers come last. All ranks call it alike; raises
    the error where no plan is left, or none is tried."""
    refused = list[int]()
    while True:
        try:
            return settled, make(settled), refused
        except (UserError, StorageError) as error:
            if settled.trials is None or (index := settled.trials.next) is None:
                raise
            refused.append(index)
            trials = settled.trials.with_result(index, None, str(error))
            settled = replace(under(settled, trials.plan, trials.microbatch), trials=trials, why=trials.why)


class Trying:
    """The trials of an attempt; nothing without `plan.measure`. All ranks call all of it alike."""

    def __init__(self, settled: Settled, engine: Engine, recorder: Recorder, saver: Saver) -> None:
        self._settled, self._engine, self._recorder, self._saver = settled, engine, recorder, saver
        self._run_dir, self._seconds, self._due = Path(settled.job.run.dir), list[float](), STEPS
        self.trials: Trials | None = settled.trials
        if self.trials is not None and (index := self.trials.next) is not None:
            self._put(self.trials.begun(index))

    def say_refused(self, refused: Sequence[int]) -> None:
        """Records the candidates that were refused before this attempt could begin; see `passing_over`."""
        if self.trials is not None and refused:
            for index in refused:
                self._say(self.trials.candidates[index])
            self._put(self.trials)

    def after(self, result: StepResult) -> None:
        """Takes in a step under the candidate that is tried."""
        if self.trials is None or self.trials.now is None:
            return
        began = time.perf_counter()
        if is_accelerator(self._engine.device):
            _ = result.loss  # waits for the device, as a few steps may
        took = result.seconds + time.perf_counter() - began
        self._seconds.append(math.nan if result.skipped else took)  # a step that updates nothing is no measure

    @property
    def is_due(self) -> bool:
        """Whether the candidate has had its steps."""
        return self.trials is not None and self.trials.now is not None and len(self._seconds) >= self._due

    def change(self) -> None:
        """Ends the trial of a candidate and begins the next one, or goes on with the fastest; goes on with the trial
        where steps were skipped."""
        trials, world = self.trials, self._engine.world
        assert trials is not None and trials.now is not None
        full = [each for each in self._seconds if not math.isnan(each)]
        took = torch.tensor([median(full[1:] or [math.inf]), STEPS - len(full)], dtype=torch.float64)
        seconds, lacking = world.everyone.all_reduce(took, "max", purpose="trial").tolist()
        if lacking > 0:
            self._due = len(self._seconds) + int(lacking)
            return
        trials = self._noted(trials, trials.now, seconds, "")
        while (index := trials.next) is not None:
            self._put(trials.begun(index))
            if (why := self._goes(trials, index)) is None:
                return
            trials = self._noted(trials, index, None, why)
        if (why := self._goes(trials, trials.fastest)) is not None:
            self._recorder.warning(f"the fastest plan that was tried is refused now: {why}")
        self._put(trials)
        self._resolve(trials)

    def stop_if_changed(self) -> None:
        """Ends the trials where somebody else has changed the plan."""
        trials = self.trials
        if trials is None or trials.now is None:
            return
        if self._engine.plan != Plan.from_dict(dict(trials.candidates[trials.now].plan)):
            self._recorder.warning("no more plans are tried: the plan was changed by hand")
            self._put(replace(trials.paused(), ended=True))

    def pause(self) -> None:
        """The run ends in good order, or goes on elsewhere."""
        if self.trials is not None and self.trials.now is not None:
            self._put(self.trials.paused())

    def _goes(self, trials: Trials, index: int) -> str | None:
        """Goes on under a candidate; returns why not, if it is refused."""
        plan = Plan.from_dict(dict(trials.candidates[index].plan))
        self._seconds, self._due = [], STEPS
        if plan == self._engine.plan:
            return None
        return go_on_under(plan, self._settled, self._engine, self._recorder, self._saver)

    def _noted(self, trials: Trials, index: int, seconds: float | None, why: str) -> Trials:
        trials = trials.with_result(index, seconds, why)
        self._say(trials.candidates[index])
        self._put(trials)
        return trials

    def _say(self, one: Candidate) -> None:
        """Records what has come of a candidate."""
        self._recorder.tried(TriedRecord(
            step=self._engine.step_index, plan=dict(one.plan), predicted=one.predicted,
            seconds=one.seconds, why=one.why,
        ))  # fmt: skip

    def _put(self, trials: Trials) -> None:
        self.trials = trials
        if self._engine.world.rank == 0:
            try:
                kept.write(self._run_dir, trials)
            except OSError as error:
                self._recorder.warning(f"what plans were tried cannot be kept: {error}")

    def _resolve(self, trials: Trials) -> None:
        """Writes resolved.toml anew, with the plan that stays."""
        if self._engine.world.rank == 0:
            now = under(self._settled, self._engine.plan, None)
            keep_resolved(now.job, now.origins, self._run_dir, trials, self._recorder.warning)
