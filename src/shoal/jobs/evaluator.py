"""The evaluator of a run: evaluates each new checkpoint, beside the ranks that train, until training has ended.

It shares only the run directory with them. What it finds goes to a file of its own there, which the report reads too.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

from shoal import units
from shoal.checkpoint.directory import completed
from shoal.checkpoint.manifest import read_manifest
from shoal.comm import World
from shoal.errors import CheckpointError, UserError
from shoal.jobs.assemble import make_engine
from shoal.jobs.choose import Settled, Sizes, settle
from shoal.jobs.config import Job, Origins
from shoal.jobs.evaluate import Subsample, measure_of
from shoal.jobs.names import DIRECTORY
from shoal.jobs.outcome import write_report
from shoal.jobs.stop import STOPPED
from shoal.plan import Plan
from shoal.report.evaluations import EVALUATIONS, read_evaluations
from shoal.report.events import evaluation_text
from shoal.report.metrics import EvalRecord, MetricsLog

LOOK_SECONDS = 1.0  # between two looks at the run directory
END_SECONDS = 60.0
"""How long a run may take after its last checkpoint to record its end: an evaluation, a sample, a report."""


def follow(job: Job, origins: Origins) -> None:
    """Evaluates the checkpoints of the job's run that are not evaluated yet, and each new one, until training ends.

    Training has ended where the newest checkpoint reached the job's limits, or where an attempt that ran meanwhile
    ended by itself; after a signal the run is expected to go on. Raises UserError where nothing is held out.
    """
    if not job.data.validation:
        raise UserError(
            "data.validation = 0: the evaluator has nothing to evaluate. Give data.validation a share above 0, or "
            "start no evaluator"
        )
    run_dir = Path(job.run.dir)
    ending = _Ending(run_dir)
    # neither the plan nor its changes: one process has the whole model, and a disk of plan.memory is the ranks'
    alone = replace(job, plan=Plan(), run=replace(job.run, at=[], nproc=1))
    evaluation = _Evaluation(settle(alone, origins, Sizes(1, 1)))
    print(f"the evaluator waits for checkpoints in {run_dir / DIRECTORY}", flush=True)
    while True:
        over = ending.has_come(evaluation.settled)  # before the look, so that no checkpoint comes in between
        known = {each.step for each in read_evaluations(run_dir)}
        for step, path in sorted(completed(run_dir / DIRECTORY)):
            if step not in known:
                evaluation.of(step, path)
        if over:
            break
        time.sleep(LOOK_SECONDS)
    evaluation.close()
    if (run_dir / "metrics.jsonl").is_file():
        try:
            write_report(run_dir)
        except OSError as error:
            print(f"warning: the report of {run_dir} cannot be written: {error}", file=sys.stderr, flush=True)
    print("training has ended", flush=True)


class _Evaluation:
    """The model of a job, the rows that it is evaluated on, and the log of what is found."""

    def __init__(self, settled: Settled) -> None:
        self.settled = settled
        job, model = settled.job, settled.model
        self.engine = make_engine(job, model, settled.total, World.single())
        self.rows = Subsample(model.prepare_data(settled.data.validation), job.run.eval_samples)
        self.log: MetricsLog | None = None

    def of(self, step: int, path: Path) -> None:
        """Evaluates a checkpoint and records it; leaves out one that the run has removed meanwhile."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*is used from here on")  # nothing is trained
                self.engine.load(path)
        except (CheckpointError, OSError):
            if path.exists():
                raise
            return
        right = measure_of(self.settled.model.loss)
        found = self.engine.evaluate(self.rows, also=() if right is None else (right,))
        accuracy = found.also[0] if found.also else None
        to = Path(self.settled.job.run.dir) / EVALUATIONS
        self.log = self.log or MetricsLog(to)
        record = EvalRecord(step=step, loss=found.loss, tokens=found.tokens, accuracy=accuracy)
        try:
            self.log.write(record)
        except OSError as error:
            raise UserError(
                f"the evaluation of step {step} cannot be written to {to}: {error}. Free space there, and start the "
                "evaluator again: it evaluates what is missing"
            ) from error
        print(f"step {step}: {evaluation_text(record)} ({units.duration(found.seconds)})", flush=True)

    def close(self) -> None:
        self.engine.close()
        if self.log is not None:
            self.log.close()


class _Ending:
    """Finds out whether the training in a run directory has ended; reads metrics.jsonl on from where it was before."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._read = self._ends = 0
        self._reason: str | None = None
        self._read_on()
        self._ends_before = self._ends
        self._at_its_limits: float | None = None

    def has_come(self, settled: Settled) -> bool:
        """Returns whether no further checkpoint is to be expected."""
        self._read_on()
        if self._reason is not None and self._ends > self._ends_before:
            return not self._reason.startswith(STOPPED)
        if not self._reached(settled):
            return False
        self._at_its_limits = self._at_its_limits or time.monotonic()
        return self._reason is not None or time.monotonic() > self._at_its_limits + END_SECONDS

    def _read_on(self) -> None:
        """Counts the attempts that recorded their end, and notes the reason of the last one where none has begun
        since."""
        path = self._run_dir / "metrics.jsonl"
        if not path.is_file():
            return
        with path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    break
                self._read += len(line)
                if line.startswith(b'{"kind": "run"'):
                    self._reason = None
                elif line.startswith(b'{"kind": "end"'):
                    self._ends, self._reason = self._ends + 1, json.loads(line)["reason"]

    def _reached(self, settled: Settled) -> bool:
        """Returns whether the newest checkpoint is of the job's last step, or after its last second."""
        newest = completed(self._run_dir / DIRECTORY)[:1]
        if not newest:
            return False
        (step, path), limit = newest[0], settled.job.train.seconds
        if settled.total is not None and step >= settled.total:
            return True
        return limit is not None and read_manifest(path).extra["user"].get("seconds", 0.0) >= limit
