"""Starts the ranks of a command on this host."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from shoal.jobs.lock import refuse_if_taken
from shoal.jobs.ranks import default_ranks, ranks_here, spread
from shoal.jobs.read import load_job, plan_assignments
from shoal.launch import discover, launch

DEMO = Path(__file__).with_name("demo.toml")


def start_job(path: Path, assignments: Sequence[str]) -> int:
    """Trains the job file on the ranks of this host; returns the exit code.

    A process that another launcher started is itself a rank. A single rank runs in this process. Raises UserError for
    an invalid job before any rank starts.
    """
    job, origins = load_job(path, assignments)
    outside = discover()
    nproc = 1 if outside.size > 1 else ranks_here(job)
    if outside.size == 1:
        spread(job, origins, nproc)
    if nproc == 1:
        from shoal.jobs.__main__ import run

        signal = run(str(path), list(assignments)).signal
        return 128 + signal if signal else 0
    refuse_if_taken(Path(job.run.dir))
    print(f"starting {nproc} ranks, of which each imports torch", flush=True)
    return launch(["-m", "shoal.jobs", str(path), *assignments], nproc, run_dir=Path(job.run.dir))


def start_script(script: Path, args: Sequence[str], nproc: int | None) -> int:
    """Runs a script on `nproc` local ranks (see `default_ranks`); returns the exit code."""
    return launch([str(script), *args], nproc if nproc is not None else default_ranks())


def start_demo(nproc: int, directory: Path | None) -> int:
    """Trains the built-in job on `nproc` ranks in `directory` (default: a new one in runs/); returns the exit code."""
    directory = directory or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    print(f"A small GPT learns Python from its standard library, on {nproc} process(es). In {directory}:\n", flush=True)
    return start_job(DEMO, [text_assignment("run.dir", str(directory)), f"run.nproc={nproc}"])


def change_plan(run_dir: Path, assignments: Sequence[str]) -> None:
    """Has the run that trains in `run_dir` change its plan, and prints what it then is. Raises UserError where it
    refuses."""
    from shoal.jobs.replan import ask  # which imports torch

    answer = ask(run_dir, plan_assignments(assignments))
    plan = ", ".join(f"{key} = {value!r}" for key, value in answer["plan"].items()) or "one rank"
    print(f"after step {answer['step']} the plan is {plan}")


def text_assignment(key: str, text: str) -> str:
    """Returns "key=value" with `text` quoted, so that any text can be assigned."""
    return f"{key}={json.dumps(text)}"
