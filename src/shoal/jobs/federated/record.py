"""Records rounds: metrics.jsonl, trackers, the progress line."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from shoal.federated.evaluation import Measured
from shoal.federated.simulation import Result
from shoal.report.lasting_log import LastingLog
from shoal.report.memory import MemoryMeter
from shoal.report.metrics import (
    CheckpointRecord,
    EndRecord,
    EvalRecord,
    RunRecord,
    StepRecord,
    WarningRecord,
)
from shoal.report.metrics import Record as AnyRecord
from shoal.report.progress import Progress
from shoal.report.rounds import RoundRecord, spread_out
from shoal.report.trackers import Trackers, make_trackers


class Record:
    """Writes the records of one attempt: a step of a run is a round."""

    def __init__(self, run_dir: Path, trackers: list[str], device: torch.device, total: int) -> None:
        self._memory, self._started = MemoryMeter(device), time.perf_counter()
        self._log = LastingLog(run_dir / "metrics.jsonl", self.note)
        self._trackers = Trackers(make_trackers(trackers, run_dir), self.warning)
        self._progress = Progress(total, sys.stdout)
        self._applied = True

    def start(self, run: RunRecord) -> None:
        """Begins the attempt."""
        self._log.write(run)
        self._trackers.start(run)

    def round(self, result: Result, measured: Measured | None, lr: float, clients: int) -> None:
        """Takes in a round, and what was measured after it. `clients`: how many there are, who are an epoch."""
        plan = result.round
        step = StepRecord(
            step=plan.number,
            epoch=0,
            loss=math.nan if result.loss is None else result.loss,
            grad_norm=None,
            lr=lr,
            tokens=result.samples,
            seconds=result.seconds,
            tokens_per_second=result.samples / result.seconds,
            mfu=None,
            memory_bytes=self._memory.read().bytes,
            time=time.time(),
        )
        self._write(step)
        ages = Counter(plan.stale)
        accuracies = None if measured is None or measured.client_accuracies is None else measured.client_accuracies
        self._write(
            RoundRecord(
                step=plan.number,
                asked=plan.asked,
                results=len(plan.tasks) - result.broken,
                dropped=plan.dropped,
                late=plan.late,
                partial=plan.partial,
                broken=result.broken,
                applied=result.applied,
                stale=[ages[age] for age in range(max(ages, default=-1) + 1)],
                simulated=plan.seconds,
                accuracies=None if accuracies is None else spread_out(accuracies.tolist()),
            )
        )
        self._progress.update(step)
        self.evaluation(plan.number, measured)
        if not result.applied and self._applied:
            self.warning(
                f"round {plan.number} left the model as it was: of {plan.asked} clients {plan.dropped} went away, "
                f"{plan.late} were late, and {result.broken} failed. Later rounds without enough results are not told "
                "of until one has them"
            )
        self._applied = result.applied

    def evaluation(self, number: int, measured: Measured | None) -> None:
        """Takes in the loss and the accuracy on what all clients hold out."""
        if measured is not None:
            self._write(EvalRecord(step=number, loss=measured.loss, tokens=measured.counts, accuracy=measured.accuracy))

    def checkpoint(self, record: CheckpointRecord) -> None:
        self._write(record)

    def warning(self, message: str) -> None:
        self._progress.message(f"warning: {message}")
        self._write(WarningRecord(message=message))

    def note(self, message: str) -> None:
        """Shows a line without recording it."""
        self._progress.message(message)

    def end(self, reason: str) -> None:
        """Writes the end record and closes all outputs; `reason` is a sentence."""
        self._write(EndRecord(reason=reason, seconds=time.perf_counter() - self._started))
        self._progress.close()
        self._trackers.close()
        self._log.close()

    def _write(self, record: AnyRecord) -> None:
        self._log.write(record)
        self._trackers.log(record)
