"""The processes of a host's ranks: started, looked at, signalled and ended together.

Each is in a session of its own and is killed by the kernel if its launcher dies, so that nothing is left of it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.comm.address import host_port
from shoal.errors import CheckpointError, LaunchError, TrainingError, UserError
from shoal.launch.failure import read_end, read_failure
from shoal.launch.fork_server import Forked, ForkServer
from shoal.launch.verdict import Ending

PEER_GRACE = 1.2
"""Seconds for the others once a rank has failed: a collective takes half a second to find out which rank is missing."""
MISTAKE_GRACE = 8.0
"""Seconds for the others after an error of `ALIKE`, so that it is reported once, and the first rank has time to write
the report of the run."""
ALIKE = (UserError.exit_code, TrainingError.exit_code, CheckpointError.exit_code)
"""Exit codes of errors that all ranks raise, each by itself."""
_TERM_GRACE = 0.4  # seconds between SIGTERM and SIGKILL
POLL = 0.02
"""Seconds between two looks at the processes."""


@dataclass(frozen=True)
class Seats:
    """The places of a host's ranks in a world.

    first, here, size: the number of the first one, how many they are, and the number of all ranks.
    store: host and port of the store's server.
    generation: counts the worlds of a job.
    """

    first: int
    here: int
    size: int
    store: tuple[str, int]
    generation: int = 0

    def variables(self, local_rank: int, scratch: Path) -> dict[str, str]:
        """Returns the variables of a rank: SHOAL_*, and torchrun's, so that a script may call `init_process_group`,
        which then takes our store for the agent's."""
        host, port = self.store
        names = {
            "RANK": self.first + local_rank,
            "SIZE": self.size,
            "LOCAL_RANK": local_rank,
            "LOCAL_SIZE": self.here,
            "GENERATION": self.generation,
            "STORE": f"tcp://{host_port(host, port)}",
            "LAUNCHER": os.getpid(),
            "FAILURE_FILE": scratch / f"rank{self.first + local_rank}.json",
        }
        plain = {
            "RANK": names["RANK"],
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self.here,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": self.generation,
        }
        ours = {f"SHOAL_{name}": str(value) for name, value in names.items()}
        return ours | {name: str(value) for name, value in plain.items()}


def make_logs(logs: Path) -> Path:
    """Makes the folder for the output of a run's processes; returns it. Raises UserError where that cannot be."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        said = f"the run directory {logs.parent} cannot be written: {error}"
        raise UserError(f"{said}. Choose another run.dir") from error
    return logs


class Team:
    """The ranks of `seats` on this host, which run `program` (see `local.launch`).

    folder: for their reports of failures.
    logs: the folder for the output of all ranks but rank 0, which has the terminal.
    variables: those that they have beside those of their places.
    forks: what they are forked from; None, and once it fails, starts new interpreters.

    Raises LaunchError where one cannot be started; the others are ended.
    """

    def __init__(
        self,
        program: list[str],
        seats: Seats,
        folder: Path,
        logs: Path,
        variables: Mapping[str, str],
        forks: ForkServer | None,
    ) -> None:
        self.ranks: list[RankProcess] = []
        self._failed: set[int] = set()
        try:
            for local_rank in range(seats.here):
                own = {**variables, **seats.variables(local_rank, folder)}
                rank = seats.first + local_rank
                log = logs / f"rank{rank}.log" if rank else None
                self.ranks.append(_started(rank, program, own, log, forks))
        except OSError as error:
            self.end()
            raise LaunchError(
                f"rank {seats.first + len(self.ranks)} of {seats.size} cannot be started: {error}. Try fewer ranks."
            ) from error

    @property
    def running(self) -> bool:
        """True while a rank's process runs."""
        return any(rank.running for rank in self.ranks)

    def failures(self) -> list[RankProcess]:
        """Returns the ranks that have failed since the last call."""
        new = [rank for rank in self.ranks if rank.rank not in self._failed and rank.failed]
        self._failed |= {rank.rank for rank in new}
        return new

    def signal(self, signum: int) -> None:
        for rank in self.ranks:
            rank.signal(signum)

    def kill(self) -> None:
        """Kills the ranks that still run, and the processes that they have started; does not wait."""
        for rank in self.ranks:
            rank.stopped = rank.stopped or rank.running
            rank.signal_group(signal.SIGKILL)

    def end(self) -> None:
        """Ends the ranks that still run, with SIGTERM and then SIGKILL, and the processes that any rank left behind."""
        left = [rank for rank in self.ranks if rank.running]
        for rank in left:
            rank.stopped = True
            rank.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + _TERM_GRACE
        while any(rank.running for rank in left) and time.monotonic() < deadline:
            time.sleep(POLL)
        for rank in self.ranks:
            rank.reap()

    def endings(self) -> list[Ending]:
        """Returns how each rank has ended, once `end` was called."""
        return [rank.ending() for rank in self.ranks]


class RankProcess:
    """The process of one rank.

    variables: all that it has. log: the file for its output; None where it has the terminal.
    descriptors: what else it is given, by the variable that tells their number.
    forks: what it is forked from; None starts a new interpreter.
    """

    def __init__(
        self,
        rank: int,
        program: list[str],
        variables: Mapping[str, str],
        log: Path | None,
        descriptors: Mapping[str, int] | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        self.rank, self.log = rank, log
        self.failure_file = Path(variables["SHOAL_FAILURE_FILE"])
        self.ended: float | None = None
        self.stopped = False
        with open(log or os.devnull, "wb") as output, _terminal() as terminal:
            given = {"SHOAL_TERMINAL": terminal, **(descriptors or {})}
            if forks is not None:
                outputs = (output.fileno(), output.fileno()) if log else (1, 2)
                self.process: subprocess.Popen[bytes] | Forked = forks.fork(program, variables, outputs, given)
                return
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shoal.launch.rank", *program],
                env={**variables, **{name: str(number) for name, number in given.items()}},
                stdin=subprocess.DEVNULL,
                stdout=output if log else None,
                stderr=output if log else None,
                start_new_session=True,
                pass_fds=tuple(given.values()),
            )

    @property
    def running(self) -> bool:
        """True while the process runs. Only `Team.end` reaps it, so that its process and group ids stay valid."""
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
        return MISTAKE_GRACE if failure is not None and failure.exit_code in ALIKE else PEER_GRACE

    def signal(self, signum: int) -> None:
        if self.running:
            os.kill(self.process.pid, signum)

    def signal_group(self, signum: int) -> None:
        """Sends a signal to the rank and the processes it started."""
        try:
            os.killpg(self.process.pid, signum)
        except ProcessLookupError:
            if self.process.returncode is None:  # just forked, and not in a session of its own yet
                with suppress(ProcessLookupError):
                    os.kill(self.process.pid, signum)

    def reap(self) -> None:
        """Kills what is left of the rank and the processes it started, and waits for its end."""
        self.signal_group(signal.SIGKILL)
        self.process.wait()
        self.ended = self.ended or time.time()

    def ending(self) -> Ending:
        """Returns how the rank has ended, once `reap` was called: of itself where only its process was stopped, and not
        its program."""
        code, seconds, stopped = self.process.returncode, self.ended, self.stopped
        assert code is not None and seconds is not None
        failure, end = read_failure(self.failure_file), read_end(self.failure_file)
        if failure is None and end is not None and (stopped or code == 0):
            code, seconds, stopped = 0, end, False
        return Ending(self.rank, socket.gethostname(), code, seconds, stopped, failure, self.log)


def _started(
    rank: int, program: list[str], variables: Mapping[str, str], log: Path | None, forks: ForkServer | None
) -> RankProcess:
    if forks is not None and forks.lives:
        with suppress(OSError):  # then it has been closed
            return RankProcess(rank, program, variables, log, forks=forks)
    return RankProcess(rank, program, variables, log)


@contextmanager
def _terminal() -> Iterator[int]:
    """Duplicates this process's stderr, for a rank whose own stderr is a file."""
    terminal = os.dup(2)
    try:
        yield terminal
    finally:
        os.close(terminal)


def library_variables(variables: Mapping[str, str], nproc: int, threads: int | None = None) -> dict[str, str]:
    """Returns variables that the libraries of a rank, one of `nproc` on this host, read when they are loaded:
    OMP_NUM_THREADS, where `threads` or nothing says it; and TORCH_CPP_LOG_LEVEL where nothing does, since torch prints
    its C++ stack for each call to a store that is slow, or went with its node. Calls that fail raise, too."""
    found = {} if "TORCH_CPP_LOG_LEVEL" in variables else {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    if threads is None and "OMP_NUM_THREADS" in variables:
        return found
    return {**found, "OMP_NUM_THREADS": str(threads or max(1, usable_cores() // nproc))}


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
