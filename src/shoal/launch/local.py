"""Starts N ranks on this host and waits for them.

    launcher (hosts the store) --+-- rank 0   output straight to the terminal
                                 +-- rank 1   output kept in a file, shown if it fails
                                 ...          each in a session of its own, killed by the kernel if the launcher dies

When a rank fails, the others get a moment to notice the closed connections, then are ended. The rank at fault is shown
first.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from shoal.comm.secret import VARIABLE, new_secret
from shoal.errors import CheckpointError, LaunchError, UserError
from shoal.launch.failure import Failure, read_failure
from shoal.launch.scratch import scratch
from shoal.launch.store import serve_on_loopback
from shoal.launch.verdict import Ending, verdict
from shoal.plan import MOST_RANKS_OF_A_HOST

PEER_GRACE = 1.2
"""Seconds for the others once a rank has failed: a collective takes half a second to find out which rank is missing."""
MISTAKE_GRACE = 8.0
"""Seconds for the others after a UserError, so that all of them raise it and it is reported once."""
SIGNAL_GRACE = 60.0
"""Seconds for the ranks to end by themselves after SIGINT or SIGTERM: a step, a checkpoint, a report."""
_TERM_GRACE = 0.4  # seconds between SIGTERM and SIGKILL
_POLL = 0.02


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

    Raises UserError if `program` does not exist, LaunchError if a rank cannot be started.
    """
    _check(program, nproc)
    server, secret = serve_on_loopback(), {VARIABLE: new_secret()}
    with scratch("run") as folder, _signals() as received:
        logs = (run_dir or folder) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        ranks: list[_Rank] = []
        try:
            for rank in range(nproc):
                variables = {**os.environ, **(env or {}), **_variables(rank, nproc, server.port, folder), **secret}
                variables.update(_threads(variables, nproc, threads))
                ranks.append(_Rank(rank, program, variables, logs / f"rank{rank}.log" if rank else None))
            _watch(ranks, received)
        except OSError as error:
            raise LaunchError(f"rank {len(ranks)} of {nproc} cannot be started: {error}. Try fewer ranks.") from error
        finally:
            _end(ranks)
        report, exit_code = verdict([rank.ending() for rank in ranks])
    if received and exit_code != CheckpointError.exit_code:  # a checkpoint that failed is reported below
        return 128 + received[0]
    if report:
        print(report, file=sys.stderr, flush=True)
    return exit_code


class _Rank:
    """The process of one rank."""

    def __init__(self, rank: int, program: list[str], variables: dict[str, str], log: Path | None) -> None:
        self.rank, self.log = rank, log
        self.failure_file = Path(variables["SHOAL_FAILURE_FILE"])
        self.ended: float | None = None
        self.stopped = False
        command = [sys.executable, "-m", "shoal.launch.rank", *program]
        with open(log or os.devnull, "wb") as output, _terminal() as terminal:
            self.process = subprocess.Popen(
                command,
                env={**variables, "SHOAL_TERMINAL": str(terminal)},
                stdin=subprocess.DEVNULL,
                stdout=output if log else None,
                stderr=output if log else None,
                start_new_session=True,
                pass_fds=(terminal,),
            )

    @property
    def running(self) -> bool:
        """True while the process runs. It is not reaped, so that its process and group ids stay valid until `_end`."""
        ended = self.ended is None and os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended:
            self.ended = time.time()
        return self.ended is None

    @property
    def failed(self) -> bool:
        if self.failure_file.exists():
            return True  # also while it hangs in its exit handlers
        if self.running:
            return False
        state = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return state is not None and state.si_status != 0

    @property
    def grace(self) -> float:
        """Seconds for the other ranks to end by themselves once this one has failed."""
        failure = read_failure(self.failure_file)
        return MISTAKE_GRACE if failure is not None and failure.exit_code == UserError.exit_code else PEER_GRACE

    def signal(self, signum: int) -> None:
        if self.running:
            os.kill(self.process.pid, signum)

    def signal_group(self, signum: int) -> None:
        """Sends a signal to the rank and the processes it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)

    def ending(self) -> Ending:
        failure: Failure | None = read_failure(self.failure_file)
        assert self.process.returncode is not None and self.ended is not None
        return Ending(
            self.rank, socket.gethostname(), self.process.returncode, self.ended, self.stopped, failure, self.log
        )


@contextmanager
def _terminal() -> Iterator[int]:
    """Duplicates this process's stderr, for a rank whose own stderr is a file."""
    terminal = os.dup(2)
    try:
        yield terminal
    finally:
        os.close(terminal)


def _check(program: list[str], nproc: int) -> None:
    if nproc < 1:
        raise UserError(f"nproc = {nproc}: at least one rank is needed")
    if nproc > MOST_RANKS_OF_A_HOST:
        raise UserError(f"nproc = {nproc}: give at most {MOST_RANKS_OF_A_HOST}")
    if not program or (program[0] == "-m" and len(program) < 2):
        raise UserError("there is no program to run: give a script, or -m and a module")
    if program[0] != "-m" and not Path(program[0]).is_file():
        raise UserError(f"the script {program[0]} does not exist (looked in {os.getcwd()})")


def _variables(rank: int, size: int, port: int, scratch: Path) -> dict[str, str]:
    """Returns the variables of a rank: SHOAL_*, and torchrun's, so that a script may call `init_process_group`, which
    then takes our store for the agent's."""
    return {
        "SHOAL_RANK": str(rank),
        "SHOAL_SIZE": str(size),
        "SHOAL_LOCAL_RANK": str(rank),
        "SHOAL_LOCAL_SIZE": str(size),
        "SHOAL_STORE": f"tcp://127.0.0.1:{port}",
        "SHOAL_GENERATION": "0",
        "SHOAL_LAUNCHER": str(os.getpid()),
        "SHOAL_FAILURE_FILE": str(scratch / f"rank{rank}.json"),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _threads(variables: Mapping[str, str], nproc: int, threads: int | None) -> dict[str, str]:
    if threads is None and "OMP_NUM_THREADS" in variables:
        return {}
    return {"OMP_NUM_THREADS": str(threads or max(1, usable_cores() // nproc))}


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the numbers of SIGINT and SIGTERM; nothing outside the main thread, where Python has no handlers."""
    received: list[int] = []

    def collect(signum: int, frame: FrameType | None) -> None:
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


def _watch(ranks: list[_Rank], received: list[int]) -> None:
    """Waits until all ranks have ended, the grace after a failure or signal is over, or a second signal comes."""
    deadline = float("inf")
    forwarded = False
    failed: set[int] = set()
    while any(rank.running for rank in ranks) and time.monotonic() < deadline and len(received) < 2:
        if received and not forwarded:
            forwarded = True
            deadline = time.monotonic() + SIGNAL_GRACE
            for rank in ranks:
                rank.signal(received[0])
        for rank in ranks if not forwarded else []:
            if rank.rank not in failed and rank.failed:
                failed.add(rank.rank)
                deadline = min(deadline, time.monotonic() + rank.grace)
        time.sleep(_POLL)


def _end(ranks: list[_Rank]) -> None:
    """Ends the ranks that still run, with SIGTERM and then SIGKILL, and the processes that any rank left behind."""
    left = [rank for rank in ranks if rank.running]
    for rank in left:
        rank.stopped = True
        rank.signal_group(signal.SIGTERM)
    deadline = time.monotonic() + _TERM_GRACE
    while any(rank.running for rank in left) and time.monotonic() < deadline:
        time.sleep(_POLL)
    for rank in ranks:
        rank.signal_group(signal.SIGKILL)
        rank.process.wait()
        rank.ended = rank.ended or time.time()
