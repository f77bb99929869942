"""A process of a node: it gets ready, waits for a place, is a rank, waits for another place, until it ends."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from shoal.comm.signed import derived
from shoal.elastic.control import FROM_PROCESS, JOB, VARIABLE, Leave, Left, Line, Place, Warm
from shoal.elastic.messages import Admitted
from shoal.elastic.pulse import VARIABLE as PULSE
from shoal.launch.board import VARIABLE as BOARD
from shoal.launch.board import Progress, read_board
from shoal.launch.fork_server import ForkServer
from shoal.launch.process import RankProcess, library_variables
from shoal.launch.verdict import Ending

STDOUT = "SHOAL_STDOUT"
"""The descriptor of the node's own stdout, for the process that is rank 0."""


class Worker:
    """The process `number` of a node, which runs `program`.

    slot: the lowest number that no other process of the node has; the process has its device by it.
    folder: for what it tells this process. variables: what else it has in its environment. log: for its output.
    forks: what it is forked from; None starts a new interpreter.

    warm: since when (time.monotonic) it is ready for places, None before that. place: where it is a rank, or was the
    last time; `left`: how it has left that generation, None while it is in it.
    """

    def __init__(
        self,
        number: int,
        slot: int,
        program: list[str],
        folder: Path,
        variables: Mapping[str, str],
        log: Path,
        forks: ForkServer | None = None,
    ) -> None:
        self.number, self.slot = number, slot
        self._board = folder / f"board{number}"
        own = {"SHOAL_FAILURE_FILE": str(folder / f"failure{number}.json"), BOARD: str(self._board)}
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._line = Line(ours, FROM_PROCESS)
        stdout = os.dup(1)
        try:
            given = {VARIABLE: theirs.fileno(), STDOUT: stdout}
            self.process = RankProcess(number, program, {**variables, **own}, log, given, forks)
        finally:
            theirs.close()
            os.close(stdout)
        self.warm: float | None = None
        self.place: Place | None = None
        self.left: Left | None = None
        self.stopped: float | None = None

    @property
    def ended(self) -> bool:
        return not self.process.running

    @property
    def waits(self) -> bool:
        """Whether it can be given a place."""
        return not self.ended and (self.place is None or self.left is not None) and self.warm is not None

    @property
    def trains(self) -> bool:
        """Whether it is in its generation, or ended there."""
        return self.place is not None and self.left is None

    def was_in(self, generation: int) -> bool:
        """Whether its last place was in that generation."""
        return self.place is not None and self.place.generation == generation

    @property
    def holds(self) -> bool:
        """Whether it waits with the state of the run in memory."""
        return self.left is not None and self.left.holds

    def listen(self) -> None:
        """Takes in what the process has said."""
        for record in self._line.receive() or ():
            if isinstance(record, Warm):
                self.warm = time.monotonic()
            elif self.place is not None and record.generation == self.place.generation:
                self.left = record

    def take(self, place: Place) -> None:
        """Makes the process a rank, which has shown nothing of this generation."""
        self.place, self.left = place, None
        self._board.unlink(missing_ok=True)
        self.process.rank = place.rank
        self._line.send(place)

    def leave(self, how: str) -> None:
        """Has the rank leave its generation; see events.NOW."""
        if self.place is not None:
            self._line.send(Leave(self.place.generation, how))

    def progress(self) -> Progress:
        """Returns what the rank shows."""
        return read_board(self._board)

    def is_stopped(self) -> bool:
        """Returns whether the process is stopped, as by SIGSTOP."""
        try:
            return psutil.Process(self.process.process.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False

    def kill(self) -> None:
        """Kills the process, and those that it has started; does not wait."""
        self.process.stopped = self.process.stopped or self.process.running
        self.process.signal_group(signal.SIGKILL)

    def ending(self) -> Ending:
        """Returns how the process has ended, and frees what it had here. It has ended, or is killed."""
        self.process.reap()
        self._line.close()
        self._board.unlink(missing_ok=True)
        return self.process.ending()


def log_of(job: Admitted, name: str) -> Path:
    """Returns the file for the output of a process of a node."""
    folder = Path(job.run_dir) / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{job.name}-{name}.log"


def variables_of(secret: bytes, folder: Path, ranks: int) -> Mapping[str, str]:
    """Returns the environment of a process of a node with so many `ranks`. It has no secret of the job: each generation
    has its own."""
    own = {JOB: derived(secret, "job").hex()[:16], "SHOAL_LAUNCHER": str(os.getpid())}
    own[PULSE] = str(folder / "pulse")
    env = {**os.environ, **own}
    return {**env, **library_variables(env, ranks)}
