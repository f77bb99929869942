"""`shoal jobs`: a job file for schedulers, and what became of the jobs that were submitted."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal.jobs.cluster.backend import Submitted

app = typer.Typer(
    help="Renders, submits and looks after jobs, here, on Slurm, Ray and Kubernetes.", no_args_is_help=True
)

JobPath = Annotated[
    Path, typer.Argument(help="The job file, TOML; or TOML or JSON with Cloud-ML's fields.", metavar="JOB")
]
RunPath = Annotated[Path, typer.Argument(help="The run directory of a job.", metavar="RUN")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replaces a value of the job: --set cluster.nodes=4."),
]
POLL = 1.0
"""Seconds between two looks at a log that is followed."""
RUNS = Path("runs")


@app.command()
def render(
    job: JobPath,
    target: Annotated[str, typer.Option("--for", help="local, slurm, ray, kubernetes, jobset or trainjob.")],
    assignments: Assignments = None,
) -> None:
    """Prints the job for a scheduler: a script, a specification, or YAML. Nothing is started."""
    from shoal.jobs.cluster.kubernetes import KINDS, secret_command
    from shoal.jobs.cluster.render import render
    from shoal.jobs.cluster.request import read_request

    request = read_request(job, assignments or [])
    print(render(request, target), end="")
    if target in KINDS:
        print(f"# the pods read a Secret, made once by: {secret_command(request)}", file=sys.stderr)


@app.command()
def submit(
    job: JobPath,
    on: Annotated[str, typer.Option(help="local, slurm or ray.")] = "local",
    assignments: Assignments = None,
) -> None:
    """Submits a job, and prints its run directory."""
    from shoal.jobs.cluster.backend import submit
    from shoal.jobs.cluster.request import read_request

    done = submit(read_request(job, assignments or []), on)
    log = f"shoal jobs logs {shlex.quote(str(done.run_dir))}"
    print(f"job {done.number} of {done.backend}; its output: `{log}`", file=sys.stderr)
    print(done.run_dir)


@app.command("ls")
def list_jobs(
    directories: Annotated[
        list[Path] | None, typer.Argument(help="Run directories, or directories of them. Default: runs.", metavar="DIR")
    ] = None,
) -> None:
    """Lists the submitted jobs with their states."""
    from shoal.errors import UserError
    from shoal.jobs.cluster.backend import jobs_in

    for directory in directories or []:
        if not directory.is_dir():
            raise UserError(f"no such directory: {directory} (from {Path.cwd()})")
    jobs = jobs_in(directories or [RUNS])
    if not jobs:
        print(f"no job was submitted in {', '.join(map(str, directories or [RUNS]))}")
        return
    cells = [("run", "on", "job", "submitted", "state", "step", ""), *map(_row, jobs)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _row(job: Submitted) -> tuple[str, ...]:
    from shoal.errors import UserError
    from shoal.jobs.cluster.backend import State, backend
    from shoal.report.follow import last_step

    try:
        state = backend(job.backend).state(job)
    except UserError as error:  # the other jobs are listed all the same
        state = State("unknown", str(error))
    step = last_step(job.run_dir / "metrics.jsonl")
    submitted = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.time))
    return str(job.run_dir), job.backend, job.number, submitted, state.word, str(step or "-"), state.detail


@app.command()
def logs(
    run: RunPath,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Goes on until the job has ended.")] = False,
) -> None:
    """Prints the output of a job."""
    from shoal.jobs.cluster.backend import backend, find

    job = find(run)
    asked, shown = backend(job.backend), 0
    while True:
        goes_on = follow and asked.state(job).goes_on  # asked before the log, so that its end is not missed
        text = asked.log(job)
        print(text[shown:], end="", flush=True)
        shown = len(text)
        if not goes_on:
            return
        time.sleep(POLL)


@app.command()
def stop(run: RunPath) -> None:
    """Has a job end after the step in progress, with a checkpoint."""
    from shoal.errors import UserError
    from shoal.jobs.cluster.backend import backend, find

    job = find(run)
    asked = backend(job.backend)
    state = asked.state(job)
    if not state.goes_on:
        raise UserError(
            f"the job of {run} does not run: {state.word}, {state.detail}. `shoal jobs submit` starts it again"
        )
    asked.stop(job)
    print(f"job {job.number} of {job.backend} was asked to end")


@app.command()
def events(run: RunPath) -> None:
    """Prints what happened to a job, by its scheduler and by its own record."""
    from shoal.jobs.cluster.backend import backend, find
    from shoal.report.events import Event, event_line, events_of
    from shoal.report.follow import Follower

    job = find(run)
    record = Follower(run / "metrics.jsonl")
    record.read()
    found = [Event(job.time, None, f"submitted to {job.backend} as {job.number}")]
    found += [*backend(job.backend).events(job), *events_of(record.records)]
    for event in sorted(found, key=lambda event: event.time or job.time):
        print(event_line(event))
