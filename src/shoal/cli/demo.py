"""`shoal demo`: a small GPT is trained on nodes of this host; a worker is killed, another one joins, and it goes on."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from shoal import units
from shoal.chaos.nodes import Cluster, ended
from shoal.chaos.watch import Over, Watch
from shoal.errors import UserError
from shoal.jobs.lock import refuse_if_taken
from shoal.jobs.read import load_job
from shoal.report.events import evaluation_text
from shoal.report.metrics import EvalRecord, Record, SampleRecord, StepRecord, WarningRecord, read_metrics
from shoal.report.progress import Progress, print_summary

DEMO = Path(__file__).with_name("demo.toml")
KILL, JOIN = 0.12, 0.25
"""The shares of the steps, or of the seconds, after which the worker is killed and another one is started."""
_NODES = "nodes"
"""The folder in the run's with what the nodes have written."""


def start_demo(nproc: int, directory: Path | None) -> int:
    """Trains the built-in job on `nproc` ranks in `directory` (default: a new one in runs/); returns the exit code."""
    directory = (directory or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}").absolute()
    shown = os.path.relpath(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):  # it would go on from it
        raise UserError(f"--dir {shown}: it is there already, and not an empty folder. Give another --dir")
    refuse_if_taken(directory)
    print(f"A small GPT learns Python from its standard library, on {nproc} process(es). In {shown}:\n", flush=True)
    try:
        with ended(Cluster(DEMO, [], (1, 2), nproc, directory / _NODES, {}, directory)) as cluster:
            Demo(cluster).show()
            cluster.wait(30.0)
            code = cluster.nodes[0].process.poll()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    shutil.rmtree(directory / _NODES / "tmp", ignore_errors=True)
    if code != 0:
        print(cluster.nodes[0].said[-2000:], file=sys.stderr)
        return code or 1
    print_summary(read_metrics(directory / "metrics.jsonl"), sys.stdout)
    print(f"\nthe report: {shown}/report.html")
    return 0


class Demo:
    """What a person sees of the run of `cluster`."""

    def __init__(self, cluster: Cluster) -> None:
        job, _ = load_job(DEMO)
        assert job.train.steps is not None and job.train.seconds is not None
        self._cluster, self._steps, self._seconds = cluster, job.train.steps, job.train.seconds
        self._watch = Watch(cluster)
        self._progress = Progress(self._steps, sys.stdout)
        self._shown = 0
        self._began = 0.0

    def show(self) -> None:
        """Shows the run to its end, and what it suffers on the way."""
        self._progress.under_way("each process imports torch and builds the model")
        try:
            self._until(lambda: self._is_over(KILL))
            self._kill()
            self._until(lambda: self._is_over(JOIN))
            self._join()
            self._until(lambda: False)
        except Over:
            self._show_records()
        self._progress.close()

    def _is_over(self, share: float) -> bool:
        """Returns whether that share of the run is over."""
        if self._watch.step and not self._began:
            self._began = time.monotonic()
        seconds = time.monotonic() - self._began if self._began else 0.0
        return self._watch.trains and (self._watch.step >= share * self._steps or seconds >= share * self._seconds)

    def _until(self, condition: Callable[[], bool]) -> None:
        def look() -> bool:
            self._show_records()
            return condition()

        self._watch.wait(look, "the demo does not come further")

    def _kill(self) -> None:
        since = self._watch.now()
        victim = self._cluster.nodes[0].ranks()[-1]
        victim.kill()
        self._progress.message(f"step {since.step}: a worker is killed (SIGKILL of process {victim.pid})")
        self._until(lambda: self._watch.next_step(since, True) is not None)
        step, noticed, lost = self._watch.next_step(since, True), self._watch.noticed(since), self._watch.lost(since)
        assert step is not None
        found = "" if noticed is None else f"noticed after {units.duration(noticed - since.time)}, "
        again = f"; {lost} step(s) were trained again" if lost else "; no step was lost"
        self._progress.message(
            f"  {found}the next step was committed after {units.duration(step.time - since.time)}{again}"
        )

    def _join(self) -> None:
        since = self._watch.now()
        self._cluster.join(1)
        self._progress.message(f"step {since.step}: another node with one worker joins")
        try:
            self._until(lambda: self._watch.nodes == 2 and self._watch.next_step(since, True) is not None)
        except Over:
            self._show_records()
            self._progress.message("  the run was over before it could train: this machine has other work to do")
            raise
        step = self._watch.next_step(since, True)
        assert step is not None
        came, stood = units.duration(step.time - since.time), units.duration(self._watch.stall(since))
        self._progress.message(f"  it trains after {came}; the others stood still for {stood} of them")

    def _show_records(self) -> None:
        for record in self._watch.records[self._shown :]:
            self._show_one(record)
        self._shown = len(self._watch.records)

    def _show_one(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self._progress.update(record)
        elif isinstance(record, EvalRecord):
            self._progress.message(f"step {record.step}: {evaluation_text(record)}")
        elif isinstance(record, SampleRecord):
            self._progress.message(f"it writes: {record.prompt}{record.text.splitlines()[0] if record.text else ''}")
        elif isinstance(record, WarningRecord):
            self._progress.message(f"warning: {record.message}")
