"""Starts N ranks on this host and waits for them.

    launcher (hosts the store) --+-- rank 0   output straight to the terminal
                                 +-- rank 1   output kept in a file, shown if it fails
                                 ...          each in a session of its own, killed by the kernel if the launcher dies

Ranks that compute on cores are forked from a process that has imported torch once for all of them
(`fork_server.imported_once`). When a rank fails, the others get a moment to notice the closed connections, then are
ended. The rank at fault is shown first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from shoal.comm.secret import VARIABLE, new_secret
from shoal.errors import CheckpointError, UserError
from shoal.launch.fork_server import imported_once
from shoal.launch.process import POLL, Seats, Team, library_variables, make_logs
from shoal.launch.scratch import scratch
from shoal.launch.store import serve_on
from shoal.launch.verdict import verdict
from shoal.plan import MOST_RANKS_OF_A_HOST

SIGNAL_GRACE = 60.0
"""Seconds for the ranks to end by themselves after SIGINT or SIGTERM: a step, a checkpoint, a report."""


def launch(
    program: list[str],
    nproc: int,
    *,
    env: Mapping[str, str] | None = None,
    threads: int | None = None,
    run_dir: Path | None = None,
) -> int:
    """Runs `program` on `nproc` local ranks; prints failures to stderr and returns the exit code.

    program: the arguments for `python`: ["script.py", ...] or ["-m", "module", ...].
    env: added to this process's environment.
    threads: OMP_NUM_THREADS of a rank; by default the environment's, or else the cores divided evenly.
    run_dir: keeps the output of ranks above 0 in run_dir/logs/rank1.log and so on.

    The exit code is 0, or that of the rank at fault: its ShoalError's (2 user, 3 training, 4 launch, 5 checkpoint), 1
    for another exception, its own if it exited, 4 if a signal killed it. It is 128 + n if this process got signal n,
    unless the checkpoint that the ranks then write failed.

    Raises UserError if `program` does not exist or `run_dir` cannot be written, LaunchError if a rank cannot be
    started.
    """
    _check(program, nproc)
    server = serve_on("127.0.0.1")
    seats = Seats(0, nproc, nproc, ("127.0.0.1", server.port))
    variables = {**os.environ, **(env or {}), VARIABLE: new_secret()}
    variables |= library_variables(variables, nproc, threads)
    with scratch("run") as folder, signals() as received:
        logs = make_logs((run_dir or folder) / "logs")
        with imported_once(program, nproc, variables, folder / "forks.log", received) as forks:
            if received:
                return 128 + received[0]
            team = Team(program, seats, folder, logs, variables, forks)
        try:
            _watch(team, received)
        finally:
            team.end()
        endings = team.endings()
        report, exit_code = verdict(endings)
    if received and exit_code != CheckpointError.exit_code:  # a checkpoint that failed is reported below
        if len(received) < 2 and any(each.stopped for each in endings):
            print(
                f"warning: ranks that had not ended {SIGNAL_GRACE:g} s after the signal were killed; what they were "
                "saving is lost, and the newest checkpoint before it counts",
                file=sys.stderr,
                flush=True,
            )
        return 128 + received[0]
    if report:
        print(report, file=sys.stderr, flush=True)
    return exit_code


def _check(program: list[str], nproc: int) -> None:
    if nproc < 1:
        raise UserError(f"nproc = {nproc}: at least one rank is needed")
    if nproc > MOST_RANKS_OF_A_HOST:
        raise UserError(f"nproc = {nproc}: give at most {MOST_RANKS_OF_A_HOST}")
    if not program or (program[0] == "-m" and len(program) < 2):
        raise UserError("there is no program to run: give a script, or -m and a module")
    if program[0] == "-m":
        return
    script = Path(program[0])
    if script.is_dir() and not (script / "__main__.py").is_file():
        raise UserError(f"{script} is a directory without a __main__.py: give a script")
    if not script.exists():
        raise UserError(f"the script {script} does not exist (looked in {os.getcwd()})")


@contextmanager
def signals() -> Iterator[list[int]]:
    """Collects the numbers of SIGINT and SIGTERM, of SIGTERM the first alone: Slurm sends two in a row when it preempts
    a job. Nothing outside the main thread, where Python has no handlers."""
    received: list[int] = []

    def collect(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT or signum not in received:
            received.append(signum)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {signum: signal.signal(signum, collect) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _watch(team: Team, received: list[int]) -> None:
    """Waits until all ranks have ended, the grace after a failure or signal is over, or a second signal comes."""
    deadline = float("inf")
    forwarded = False
    while team.running and time.monotonic() < deadline and len(received) < 2:
        if received and not forwarded:
            forwarded = True
            deadline = time.monotonic() + SIGNAL_GRACE
            team.signal(received[0])
        for rank in team.failures() if not forwarded else []:
            deadline = min(deadline, time.monotonic() + rank.grace)
        time.sleep(POLL)
