"""The entry point of each rank of `shoal train`: python -m shoal.jobs job.toml [table.key=value ...]."""

from __future__ import annotations

import os
import sys

from shoal.jobs.imports import imports

with imports():
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    from shoal.elastic.control import CALLED, call_this, control
    from shoal.errors import CheckpointError
    from shoal.jobs.evaluator import follow
    from shoal.jobs.live import LiveRank
    from shoal.jobs.outcome import Outcome
    from shoal.jobs.read import load_job
    from shoal.jobs.served.follow import follow as follow_first
    from shoal.jobs.served.serve import serve
    from shoal.jobs.served.worker import work
    from shoal.jobs.status import rank_in
    from shoal.jobs.train import train
    from shoal.jobs.underway import tell_what_is_under_way
    from shoal.launch import discover
    from shoal.report.metrics import read_metrics
    from shoal.report.progress import print_summary


def run(path: str, assignments: list[str]) -> int:
    """Trains the job file `path` with `assignments` on top, or does what this process's role is in that; returns
    the exit code. Rank 0, or the parameter server, prints a summary, the report's path last."""
    if (supervised := control()) is not None:
        return told(LiveRank(path, assignments, supervised).to_its_end())
    place = discover()
    with tell_what_is_under_way(place.serves == 0 or (place.rank == 0 and not place.servers)):
        job, origins = load_job(path, assignments)
        if place.serves:
            stopped = follow_first(job, origins, place)
            return 128 + stopped if stopped else 0
        if place.serves is not None:
            return told(serve(job, origins, place))
        if place.evaluates:
            follow(job, origins)
            return 0
        if place.servers:
            stopped = work(job, origins, place)
            return 128 + stopped if stopped else 0
        outcome = train(job, origins)
    return told(outcome)


def told(outcome: Outcome) -> int:
    """Prints the summary of a run where there is one; returns the exit code. Raises CheckpointError where the report
    could not be written, as for weights that could not."""
    if outcome.report is not None or outcome.unwritten:
        tell(outcome)
    if outcome.unwritten:
        raise CheckpointError(outcome.unwritten)
    return 128 + outcome.signal if outcome.signal else 0


def tell(outcome: Outcome) -> None:
    """Prints the outcome of a run: the reason it ended, a table, the last sample and the report's path."""
    records = read_metrics(outcome.run_dir / "metrics.jsonl")
    console = Console(file=sys.stdout, highlight=False)
    console.print(Text(f"\n{outcome.reason}"))
    print_summary(records, sys.stdout)
    if records.samples:
        last = records.samples[-1]
        console.print(Panel(Text.assemble((last.prompt, "bold"), last.text), title="sample", title_align="left"))
    if outcome.report is not None:
        print(f"report: {outcome.report}", flush=True)


if __name__ == "__main__":
    if (rank := rank_in(os.environ)) is not None:
        call_this(f"{CALLED}{rank}")  # the environment that others see of a process is that of what it was forked from
    code, place = run(sys.argv[1], sys.argv[2:]), discover()
    if control() is None and (place.rank == 0 or place.servers or place.serves is not None):
        sys.exit(code)  # a signal may have reached this process alone, of which the launcher says nothing then
