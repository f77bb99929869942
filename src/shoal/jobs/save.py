"""Writes the checkpoints of a run in the background. A save that fails is a warning, except the last one of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.checkpoint.directory import step_path
from shoal.engine import Engine
from shoal.errors import CheckpointError
from shoal.jobs.names import DIRECTORY
from shoal.jobs.record import Recorder


class Saver:
    """Saves `engine` into the run's directory of checkpoints. The engine raises the same errors on all ranks, so they
    stay in step.

    keep: number of checkpoints to keep.
    user: returns JSON data for the next attempt, called at each save.
    saved: step of the newest checkpoint.
    verify: called before each save, so that every checkpoint is one to go back to.
    failure: the error because of which the newest state is not on the disk, else None.
    """

    def __init__(
        self,
        engine: Engine,
        recorder: Recorder,
        run_dir: Path,
        keep: int,
        user: Callable[[], Mapping[str, Any]],
        saved: int,
        verify: Callable[[], None],
    ) -> None:
        self._engine, self._recorder, self._user, self._verify = engine, recorder, user, verify
        self._run_dir, self._keep = run_dir, keep
        self._under_way: tuple[int, float] | None = None
        self._latest = saved  # step 0 needs no checkpoint
        self.failure: CheckpointError | None = None

    def save(self, wait: bool = False) -> None:
        """Begins a checkpoint of the current step, and records whether the one before it was completed.

        wait: return when the checkpoint is complete, or has failed.
        """
        step = self._engine.step_index
        if step == self._latest and not (wait and self._under_way):
            return
        self._verify()
        began = time.perf_counter()
        try:
            self._begin(wait)
            self._record()
        except CheckpointError as error:  # of the save before: this one has not begun
            self.failed(error)
            try:
                self._begin(wait)
            except CheckpointError as error:
                self.failed(error)
                return
        self._latest, self._under_way = step, (step, time.perf_counter() - began)
        if wait:
            self._record()

    def close(self) -> None:
        """Waits for the save in progress, and closes the engine."""
        try:
            self._engine.close()
            self._record()
        except CheckpointError as error:
            self.failed(error)
            self._engine.close()  # the error is raised once; this call ends the lane

    def failed(self, error: CheckpointError) -> None:
        self._under_way, self.failure = None, error
        self._recorder.warning(str(error))

    def _begin(self, wait: bool) -> None:
        self._engine.save(self._run_dir / DIRECTORY, wait=wait, keep=self._keep, extra=self._user())

    def _record(self) -> None:
        if self._under_way is not None:
            step, seconds = self._under_way
            path = step_path(self._run_dir / DIRECTORY, step)
            self._recorder.checkpoint(step, str(path.relative_to(self._run_dir)), seconds)
            self._under_way = self.failure = None
