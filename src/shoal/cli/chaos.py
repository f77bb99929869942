"""`shoal chaos`: the schedule from the command line, and what came of it as tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal import units
from shoal.chaos.faults import KINDS, Schedule, drawn, read_schedule
from shoal.chaos.perform import END_UNKNOWN, Outcome, Row, Setting, perform
from shoal.elastic.limits import node_limits
from shoal.errors import UserError
from shoal.jobs.read import load_job


def rehearse(
    job: Path,
    schedule: Path | None,
    faults: str | None,
    seed: int,
    *,
    nodes: str,
    nproc: int,
    directory: Path | None,
    tolerance: float,
    pace: float | None,
    assignments: Sequence[str],
    as_json: bool,
) -> int:
    """Performs the faults of a schedule, or of one that is drawn; prints what came of it and returns the exit code."""
    least, size = node_limits(nodes)
    plan = _schedule(job, schedule, faults, seed, assignments)
    folder = (directory or Path("runs") / f"chaos-{datetime.now():%Y%m%d-%H%M%S}").resolve()
    setting = Setting(job.resolve(), tuple(assignments), least, size, nproc, folder, tolerance, pace)
    outcome = perform(setting, plan, lambda text: print(f"shoal: {text}", file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps({**asdict(outcome), "passed": outcome.passed, "seed": plan.seed, "folder": str(folder)}))
    else:
        show(outcome, plan, folder)
    return int(not outcome.passed)


def _schedule(job: Path, schedule: Path | None, faults: str | None, seed: int, assignments: Sequence[str]) -> Schedule:
    if schedule is not None:
        if faults is not None:
            raise UserError("a schedule and --faults both say which faults there are: give one of them")
        return read_schedule(schedule)
    steps = load_job(job, assignments)[0].train.steps
    if steps is None:
        raise UserError(END_UNKNOWN)
    return drawn(list(KINDS) if faults is None else faults.split(","), steps, seed)


def show(outcome: Outcome, schedule: Schedule, folder: Path) -> None:
    """Prints the faults as a table, and the verdict."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    table = Table(title=f"faults, seed {schedule.seed}", title_justify="left", box=None, pad_edge=False)
    for name in ("fault", "met", "after step", "noticed", "next step", "steps lost"):
        table.add_column(name, justify="left" if name in ("fault", "met") else "right", no_wrap=name != "met")
    for row in outcome.rows:
        table.add_row(row.fault.kind, row.note or row.victim, str(row.step), *_times(row))
    console.print(table)
    for check in outcome.checks:
        console.print(f"{'ok  ' if check.passed else 'FAIL'}  {check.name}: {check.text}", markup=False)
    console.print(
        f"{'nothing was lost' if outcome.passed else 'the run has lost something'}; everything is in {folder}"
    )


def _times(row: Row) -> tuple[str, str, str]:
    noticed = "-" if row.noticed is None else units.duration(row.noticed)
    return noticed, "-" if row.recovered is None else units.duration(row.recovered), str(row.lost)
