"""Checkpoints of a run, written in the background; a save that fails is a warning, and training goes on. The last one must not fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.checkpoint.directory import step_path
from shoal.engine import Engine
from shoal.errors import CheckpointError
from shoal.jobs.record import Recorder

DIRECTORY, TOKENIZER = "checkpoints", "tokenizer"
"""Of a run directory: its checkpoints; its own copy of the tokenizer, so that it needs no cache elsewhere."""


class Saver:
    """Saves `engine` into the run's directory of checkpoints. What the engine raises is the same on every rank, so all go on alike.

    `user()`: what the next attempt reads back, JSON. `saved`: the step of the newest checkpoint. `failure`: why the newest state is not on the disk.
    """

    def __init__(
        self, engine: Engine, recorder: Recorder, run_dir: Path, keep: int, user: Callable[[], Mapping[str, Any]], saved: int
    ) -> None:
        self._engine, self._recorder, self._user = engine, recorder, user
        self._run_dir, self._keep = run_dir, keep
        self._under_way: tuple[int, float] | None = None
        self._latest = saved  # step 0 needs no checkpoint
        self.failure: CheckpointError | None = None

    def save(self) -> None:
        """Begins a checkpoint of this moment. Whether the one before it came to its end is known, and recorded, here."""
        step = self._engine.step_index
        if step == self._latest:
            return
        began = time.perf_counter()
        try:
            self._begin()
            self._record()
        except CheckpointError as error:  # of the save before: this one has not begun
            self._failed(error)
            try:
                self._begin()
            except CheckpointError as error:
                self._failed(error)
                return
        self._latest, self._under_way = step, (step, time.perf_counter() - began)

    def close(self) -> None:
        """Waits for the save under way, and closes the engine."""
        try:
            self._engine.close()
            self._record()
        except CheckpointError as error:
            self._failed(error)
            self._engine.close()  # the error is told once; what is left is to end the lane

    def _failed(self, error: CheckpointError) -> None:
        self._under_way, self.failure = None, error
        self._recorder.warning(str(error))

    def _begin(self) -> None:
        self._engine.save(self._run_dir / DIRECTORY, wait=False, keep=self._keep, extra=self._user())

    def _record(self) -> None:
        if self._under_way is not None:
            step, seconds = self._under_way
            path = step_path(self._run_dir / DIRECTORY, step)
            self._recorder.checkpoint(step, str(path.relative_to(self._run_dir)), seconds)
            self._under_way = self.failure = None
