"""Everything that a GPU can show, in the order of worth, within a time.

    PYTHONPATH=src:. python3 -m benchmarks.gpu.all [--minutes 9] [--device cuda] [--tiny] [--results DIRECTORY]

Parity with the CPU first, then races between streams, then memory errors of kernels (compute-sanitizer, where it is
installed), then every benchmark. Each is a process with a time limit of its own and writes its record as it goes, so
that a borrowed GPU gives what it can: what is stopped keeps what it had seen, what no time is left for is named.
Writes results/gpu_all.json after each. `--device cpu --tiny` runs the same road without a GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.records import Record, options

SMALLEST_LIMIT = 5.0
"""Seconds below which nothing is started."""


@dataclass(frozen=True)
class Job:
    """One process.

    - `seconds`: its time limit on a GPU; where only the road is tried it has all the time that is left
    - `tiny`: arguments in place of `arguments` there
    """

    script: str
    seconds: float
    arguments: tuple[str, ...] = ()
    tiny: tuple[str, ...] = ()
    sanitized: bool = False

    @property
    def title(self) -> str:
        return " ".join((self.script, *self.arguments, *(("under compute-sanitizer",) if self.sanitized else ())))

    def command(self, arguments: argparse.Namespace) -> list[str]:
        tool = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "3"] if self.sanitized else []
        given = [*(self.tiny if arguments.tiny else self.arguments), "--device", arguments.device]
        results = ["--results", str(arguments.results)] if arguments.results else []
        return [*tool, sys.executable, "-m", f"benchmarks.gpu.{self.script}", *given, *results]

    def runs_here(self, arguments: argparse.Namespace) -> bool:
        on_gpu = arguments.device.startswith("cuda")
        return not self.sanitized or (on_gpu and shutil.which("compute-sanitizer") is not None)


CHECKS, TIMES = ("--checks",), ("--times",)
LITTLE = (*TIMES, "--preset", "1m", "--steps", "1", "--rounds", "1")
JOBS = (
    Job("engine", 90, CHECKS, CHECKS),
    Job("exchange", 60, CHECKS, CHECKS),
    Job("pipeline", 60, CHECKS, CHECKS),
    Job("offload", 40, CHECKS, CHECKS),
    Job("train", 60, CHECKS, (*CHECKS, "--no-compile")),
    Job("server", 45, CHECKS, CHECKS),
    Job("races", 120, ("--seeds", "2", "--steps", "4"), ("--seeds", "1", "--steps", "1")),
    Job("engine", 60, CHECKS, CHECKS, sanitized=True),
    Job("train", 120, (*TIMES, "--preset", "124m", "--rounds", "3"), (*LITTLE, "--tokens", "128", "--no-compile")),
    Job("offload", 150, (*TIMES, "--preset", "1.3b", "--only", "rates,budgets"),
        (*TIMES, "--preset", "1m", "--steps", "1", "--tokens", "128", "--mebibytes", "1", "--only", "rates")),
    Job("engine", 90, (*TIMES, "--preset", "350m"), (*LITTLE, "--batch", "1", "--no-compile")),
    Job("pipeline", 120, (*TIMES, "--preset", "350m"), (*LITTLE, "--microbatches", "4", "--rows", "1")),
    Job("exchange", 30, (*TIMES, "--mebibytes", "256"), (*TIMES, "--mebibytes", "1", "--rounds", "1")),
    Job("server", 30, TIMES, (*TIMES, "--mebibytes", "1", "--rounds", "1", "--rows", "70000")),
    Job("train", 150, (*TIMES, "--preset", "1.3b"), (*LITTLE, "--tokens", "128", "--no-compile")),
    Job("planner", 120, (*TIMES, "--preset", "350m"),
        (*TIMES, "--preset", "1m", "--tokens", "512", "--steps", "12", "--kinds", "plain")),
    Job("offload", 200, (*TIMES, "--preset", "1.3b", "--only", "largest"),
        (*TIMES, "--preset", "1m", "--steps", "1", "--tokens", "128", "--only", "rates", "--mebibytes", "1")),
)  # fmt: skip


def run_job(job: Job, arguments: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Runs one process within `limit` seconds; it and what it has started end with it."""
    print(f"\n== {job.title} (at most {limit:.0f} s)", flush=True)
    began = time.monotonic()
    process = subprocess.Popen(job.command(arguments), start_new_session=True)
    try:
        code: int | str = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = "stopped at its limit"
    finally:
        end(process)
    return {"job": job.title, "exit": code, "seconds": round(time.monotonic() - began, 1)}


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process group; it may have ended by itself."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def run_all(arguments: argparse.Namespace, record: Record, jobs: tuple[Job, ...] = JOBS) -> list[dict[str, Any]]:
    """A row for each job, kept in the record after each."""
    ends, table = time.monotonic() + arguments.minutes * 60, list[dict[str, Any]]()
    for job in jobs:
        left = ends - time.monotonic()
        if not job.runs_here(arguments):
            table.append({"job": job.title, "exit": "needs compute-sanitizer", "seconds": 0.0})
        elif left < SMALLEST_LIMIT:
            table.append({"job": job.title, "exit": "no time was left", "seconds": 0.0})
        else:
            table.append(run_job(job, arguments, left if arguments.tiny else min(job.seconds, left)))
        record.keep(jobs=table)
    return table


def main() -> None:
    parser = options("all")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tiny", action="store_true", help="the road only: smallest models, one round")
    arguments = parser.parse_args()
    with Record("gpu_all", arguments) as record:
        table = run_all(arguments, record)
    print(f"\n{'job':64s} {'seconds':>8s}  exit")
    for row in table:
        print(f"{row['job']:64s} {row['seconds']:8.1f}  {row['exit']}")
    if any(isinstance(row["exit"], int) and row["exit"] for row in table):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
