"""Records a run on rank 0: metrics, trackers, the progress line. The recorder of other ranks does nothing."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import torch

from shoal import units
from shoal.errors import LaunchError
from shoal.jobs.underway import shown_by
from shoal.report import flops
from shoal.report.lasting_log import LastingLog
from shoal.report.memory import MemoryMeter
from shoal.report.metrics import (
    COUNTS,
    CheckpointRecord,
    EndRecord,
    EvalRecord,
    MembershipRecord,
    MovesRecord,
    PlanRecord,
    Record,
    RunRecord,
    SampleRecord,
    ServerRecord,
    StepRecord,
    TermsRecord,
    TriedRecord,
    WarningRecord,
)
from shoal.report.progress import Progress
from shoal.report.trackers import Trackers, make_trackers
from shoal.toml import plan_text
from shoal.training.evaluation import Evaluation
from shoal.training.norms import by_layer
from shoal.training.result import StepResult

RECENT = 4
"""How many steps a rank remembers, beside those whose numbers have not been read."""


class Recorder:
    """Writes the records of one attempt to metrics.jsonl in `run_dir`, to the trackers and to the progress line.

    active: False makes every method do nothing.
    device: the device whose memory is recorded.
    total: number of steps of the whole run; None where it is not known.
    flops_per_sample: of forward and backward; None where not known.
    late: a step's numbers are read this many steps later, so that reading them does not block.
    stream: of the progress line; by default stdout.
    """

    def __init__(
        self,
        run_dir: Path,
        trackers: list[str],
        *,
        active: bool,
        device: torch.device,
        total: int | None,
        flops_per_sample: float | None,
        late: int = 0,
        stream: TextIO | None = None,
    ) -> None:
        self._active, self._flops_per_sample, self._peak = active, flops_per_sample, 0.0
        self._memory = MemoryMeter(device)
        self._recent: deque[tuple[StepResult, int, float]] = deque(maxlen=late + RECENT)
        self._started = self._lap = time.perf_counter()
        self._unread: deque[tuple[StepResult, int, float]] = deque()
        self._handed = list[StepRecord]()  # of steps before this attempt
        if not active:
            return
        self._late = late
        self._log = LastingLog(run_dir / "metrics.jsonl", self._message)
        self._trackers = Trackers(make_trackers(trackers, run_dir), self.warning)
        self._progress = Progress(total, stream or sys.stdout)
        self._ending = ExitStack()
        self._ending.enter_context(shown_by(self._progress.under_way))

    def start(self, run: RunRecord) -> None:
        """Begins the attempt; the time of the first step counts from here."""
        if self._active:
            self._peak = run.peak_flops
            self._log.write(run)
            self._trackers.start(run)
        self._lap = time.perf_counter()

    def step(self, result: StepResult, samples: int) -> None:
        """Takes in a step of `samples` samples. Its time is the time since the step before, without pauses."""
        now = time.perf_counter()
        self._recent.append((result, samples, now - self._lap))
        self._lap = now
        if not self._active:
            return
        self._unread.append(self._recent[-1])
        while len(self._unread) > self._late:
            self._read()

    def late(self, result: StepResult, samples: int) -> StepRecord:
        """Returns the record of a step that was committed and then cut short, which is one of the last from then on."""
        self._handed.append(self._record(result, samples, time.perf_counter() - self._lap))
        return self._handed[-1]

    def recent(self) -> list[StepRecord]:
        """Returns the records of the last steps, for whoever records in place of a rank 0 that is gone; all ranks have
        them. Those of a step that was cut short are left out."""
        found = [*self._handed]
        with suppress(LaunchError):
            found += (self._record(*each) for each in self._recent)
        return found

    def trained(self, record: StepRecord) -> None:
        """Takes in the record of a step that others have computed."""
        if self._active:
            self._write(record)
            self._progress.update(record)

    def missing(self, records: Sequence[StepRecord]) -> None:
        """Takes in the records of steps that another process has trained and not recorded. All ranks remember them: the
        first one may be gone before it has written them."""
        self._handed += records
        for record in records:
            self._write(record)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the time inside from the time of a step."""
        self.flush()
        yield
        self._lap = time.perf_counter()

    def flush(self) -> None:
        """Reads the numbers of all steps taken in so far."""
        while self._unread:
            self._read()

    def moves(self, record: MovesRecord) -> None:
        self._write(record)

    def evaluation(self, step: int, evaluation: Evaluation, accuracy: float | None = None) -> None:
        right = "" if accuracy is None else f", accuracy {accuracy:.1%}"
        self._message(
            f"step {step}: validation loss {evaluation.loss:.4f}{right} ({units.duration(evaluation.seconds)})"
        )
        self._write(EvalRecord(step=step, loss=evaluation.loss, tokens=evaluation.tokens, accuracy=accuracy))

    def sample(self, step: int, prompt: str, text: str) -> None:
        self._write(SampleRecord(step=step, prompt=prompt, text=text))

    def plan(self, step: int, plan: Mapping[str, Any], seconds: float, late: int) -> None:
        """Takes in a change of the plan after `step`; from here on numbers are read `late` steps later."""
        self._late = late
        self._message(f"step {step}: the plan is {plan_text(dict(plan))} from here on ({units.duration(seconds)})")
        self._write(PlanRecord(step=step, plan=dict(plan), seconds=seconds))

    def tried(self, record: TriedRecord) -> None:
        """Takes in a plan that was tried, or passed over."""
        took = f"{record.seconds:.4g} s a step" if record.seconds is not None else f"passed over: {record.why}"
        self._message(f"step {record.step}: tried {plan_text(record.plan)}: {took}, {record.predicted:.4g} s predicted")
        self._write(record)

    def terms(self, record: TermsRecord) -> None:
        """Takes in what a step was spent on."""
        self._write(record)

    def server(self, record: ServerRecord) -> None:
        """Takes in what a parameter server has seen."""
        self._write(record)

    def membership(self, record: MembershipRecord) -> None:
        """Takes in the generation that this attempt is."""
        again = f"; {record.lost} step(s) since the last checkpoint are trained again" if record.lost else ""
        worlds = f"generation {record.generation}: {record.world} rank(s) on {record.nodes} node(s)"
        self._message(f"{worlds} ({record.why}){again}")
        self._write(record)

    def checkpoint(self, step: int, path: str, seconds: float) -> None:
        self._write(CheckpointRecord(step=step, path=path, seconds=seconds))

    def warning(self, message: str) -> None:
        self._message(f"warning: {message}")
        self._write(WarningRecord(message=message))

    def note(self, message: str) -> None:
        """Shows a line without recording it."""
        self._message(message)

    def end(self, reason: str) -> None:
        """Writes the end record and closes all outputs; `reason` is a sentence."""
        if not self._active:
            return
        self.flush()
        self._write(EndRecord(reason=reason, seconds=time.perf_counter() - self._started))
        self.close()

    def close(self) -> None:
        """Closes all outputs, without the end of the run: somebody else goes on."""
        if not self._active:
            return
        self._ending.close()
        self._progress.close()
        self._trackers.close()
        self._log.close()

    def _read(self) -> None:
        record = self._record(*self._unread.popleft())
        self._write(record)
        self._progress.update(record)

    def _record(self, result: StepResult, samples: int, seconds: float) -> StepRecord:
        tokens = round(result.tokens / (result.share or 1.0))
        share = flops.mfu(self._flops_per_sample * samples, seconds, self._peak) if self._flops_per_sample else None
        counts = result.tokens_per_expert
        return StepRecord(
            step=result.step + 1,
            epoch=result.epoch,
            loss=result.loss,
            grad_norm=None if result.skipped else result.grad_norm,
            lr=result.lr[0],
            tokens=tokens,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            mfu=share,
            memory_bytes=self._memory.read().bytes,
            time=time.time(),
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            imbalance=result.imbalance,
            dropped=result.dropped,
            tokens_per_expert=counts if counts and sum(map(len, counts)) <= COUNTS else None,
            norms=by_layer(result.norms) if result.norms and not result.skipped else None,
        )

    def _write(self, record: Record) -> None:
        if self._active:
            self._log.write(record)
            self._trackers.log(record)

    def _message(self, text: str) -> None:
        if self._active:
            self._progress.message(text)
