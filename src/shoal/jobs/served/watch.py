"""Records what a job's server sees: steps, evaluations, checkpoints, and who has pushed what."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.checkpoint.directory import step_path
from shoal.data import Cursor
from shoal.errors import ShoalError
from shoal.jobs.names import DIRECTORY
from shoal.jobs.record import Recorder
from shoal.report.changes import ServerRecord
from shoal.report.memory import MemoryMeter
from shoal.report.metrics import StepRecord
from shoal.server.ledger import Gradient, Ledger, Outcome
from shoal.server.weights import Weights
from shoal.training.evaluation import Evaluation


class Recording:
    """The watch of a job's part, for `recorder`; see keeping.Watch. Its methods may be called from any thread.

    recorded: the last step that is recorded already.
    failure: the error because of which the newest checkpoint is not on the disk, else None.
    """

    def __init__(self, recorder: Recorder, run_dir: Path, weights: Weights, cursor: Cursor, recorded: int) -> None:
        self._recorder, self._run_dir, self._weights, self._cursor = recorder, run_dir, weights, cursor
        self._recorded = recorded
        self._guard = threading.Lock()
        self._lap = time.perf_counter()
        self._memory = MemoryMeter(weights.engine.device)
        self._pushes: Counter[int] = Counter()
        self.failure: ShoalError | None = None

    def pushed(self, push: Gradient, outcome: Outcome) -> None:
        with self._guard:
            self._pushes[push.rank] += 1
            if outcome.update is None:
                return
            step = self._weights.engine.step_index
            now = time.perf_counter()
            seconds, self._lap = max(now - self._lap, 1e-9), now
            if step > self._recorded:
                self._recorder.trained(self._step(step, outcome.update.gradients, seconds))

    def evaluated(self, version: int, found: Mapping[str, Any]) -> None:
        loss = math.nan if found["loss"] is None else float(found["loss"])
        with self._guard:
            step = int(found["step"])
            evaluation = Evaluation(loss, int(found["tokens"]), float(found["seconds"]))
            self._recorder.evaluation(step, evaluation, found.get("accuracy"))
            if text := found.get("sample"):
                self._recorder.sample(step, str(found["prompt"]), str(text))

    def saved(self, version: int, seconds: float) -> None:
        with self._guard:
            self.failure = None
            if version:
                path = step_path(self._run_dir / DIRECTORY, version)
                self._recorder.checkpoint(version, str(path.relative_to(self._run_dir)), seconds)
            self._lap = time.perf_counter()

    def failed(self, error: ShoalError) -> None:
        with self._guard:
            self.failure = error
            self._recorder.warning(str(error))

    def tell(self, ledger: Ledger, policy: str, here: Sequence[int]) -> None:
        """Records who is there, and how stale what they have computed was."""
        with self._guard:
            clients = [
                {"client": rank, "pushes": self._pushes[rank], "here": rank in here} for rank in sorted(ledger.members)
            ]
            stale = ledger.staleness or ledger.lags
            self._recorder.server(
                ServerRecord(
                    step=ledger.version,
                    policy=policy,
                    clients=clients,
                    pushes=ledger.pushes,
                    dropped=ledger.dropped,
                    scaled=ledger.scaled,
                    staleness={str(value): stale[value] for value in sorted(stale)},
                    lags={str(value): ledger.lags[value] for value in sorted(ledger.lags)},
                    servers=self._weights.shares,
                )
            )

    def _step(self, step: int, gradients: Sequence[Gradient], seconds: float) -> StepRecord:
        tokens = sum(each.count for each in gradients)
        losses = sum(each.count * float(each.note["loss"]) for each in gradients)
        return StepRecord(
            step=step,
            epoch=self._cursor.epoch(step - 1),
            loss=losses / tokens if tokens else math.nan,
            grad_norm=self._weights.norm,
            lr=self._weights.rate,
            tokens=round(tokens),
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            mfu=None,
            memory_bytes=self._memory.read().bytes,
            time=time.time(),
        )
