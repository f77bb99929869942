"""A process that has imported what the ranks of a host import, once, and from which they are forked in milliseconds: a
rank that takes the place of another takes no core from those that train.

    launcher --+-- fork server: `python -m shoal.launch.forks PROGRAM`; imports, then forks
               +-- rank: forked by the fork server, but the launcher's child

The parent of a rank is the launcher, since the process between the two ends at once, and Linux gives the children of
those that end to the next ancestor that asks for them (PR_SET_CHILD_SUBREAPER): the launcher asks while it waits for a
fork. A message is its length, 8 bytes, and JSON; its first byte carries the descriptors of the rank's output and of
what it is given besides.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.device import accelerators

SOCKET = "SHOAL_FORK_SERVER"
"""The descriptor of a fork server's end of the line to its launcher."""
NAME = "shoal-forks"
"""What a fork server is called by the kernel (`ps -o comm`). Its ranks have the arguments of their fork server, but not
this name."""
PATIENCE = 10.0
"""Seconds that a fork may take."""
_POLL = 0.01
_PR_SET_CHILD_SUBREAPER = 36
LENGTH, PID = struct.Struct("!Q"), struct.Struct("!q")
READY = b"r"
"""What a fork server says once it has imported all."""


class Forked:
    """The process `pid`, a child of this one, as `subprocess.Popen` has it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: Any = None  # an int, once `wait` has returned

    def wait(self) -> int:
        """Waits for its end; returns its exit code, or the negative number of the signal that has killed it."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class ForkServer:
    """A process that imports what `program` does (see `local.launch`), for ranks with these `variables` at least; those
    that libraries read when they are loaded, such as OMP_NUM_THREADS, cannot be changed later.

    log: for its output. Raises OSError where it cannot be started. Linux alone has it, see `available`.
    """

    def __init__(self, program: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self._line, theirs = socket.socketpair()
        # how torch looks for GPUs without the driver, which does not outlive a fork
        given = {**variables, SOCKET: str(theirs.fileno()), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "shoal.launch.forks", *program],
                    env=given,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                )
        except OSError:
            self._line.close()
            raise
        finally:
            theirs.close()
        self._ready = False

    @property
    def lives(self) -> bool:
        """Whether it can fork, now or once it is ready."""
        return self._line.fileno() >= 0 and self._process.poll() is None

    @property
    def ready(self) -> bool:
        """Whether it has imported all; does not wait."""
        if not self._ready and self.lives:
            self._line.setblocking(False)
            try:
                self._ready = self._line.recv(1) == READY
            except BlockingIOError:
                pass
            except OSError:
                self.close()
        return self._ready and self.lives

    def fork(
        self, program: Sequence[str], variables: Mapping[str, str], outputs: tuple[int, int], given: Mapping[str, int]
    ) -> Forked:
        """Starts a rank: `program`, in a session of its own.

        variables: all that it has. outputs: the descriptors for its stdout and stderr. given: descriptors that it has
        besides, by the variable that tells it their numbers. Raises OSError where that fails, and the fork server is
        closed.
        """
        request = json.dumps({"program": list(program), "variables": dict(variables), "given": list(given)}).encode()
        self._line.settimeout(PATIENCE)
        try:
            data = LENGTH.pack(len(request)) + request
            with _adopting():
                sent = socket.send_fds(self._line, [data], [*outputs, *given.values()])
                self._line.sendall(data[sent:])
                (pid,) = PID.unpack(receive(self._line, PID.size))
            if pid < 0:
                raise OSError(-pid, os.strerror(-pid))
        except OSError:
            self.close()
            raise
        return Forked(pid)

    def close(self) -> None:
        """Ends it. Its ranks go on."""
        self._line.close()
        self._process.kill()
        self._process.wait()


def available() -> bool:
    """Returns whether this system has what a fork server needs."""
    return sys.platform == "linux"


@contextmanager
def imported_once(
    program: Sequence[str], ranks: int, variables: Mapping[str, str], log: Path, received: Sequence[int]
) -> Iterator[ForkServer | None]:
    """Context with a fork server that has imported all, for so many `ranks` with these `variables` at least. None where
    each is to import for itself: a single one, on a host with accelerators, whose drivers need not outlive a fork, or
    where the fork server fails: what is wrong the ranks say themselves. Waits no longer once a signal is `received`."""
    if not available() or ranks == 1 or accelerators():
        yield None
        return
    try:
        server = ForkServer(program, {**variables, "SHOAL_LAUNCHER": str(os.getpid())}, log)
    except OSError:
        yield None
        return
    try:
        while server.lives and not server.ready and not received:
            time.sleep(_POLL)
        yield server if server.ready else None
    finally:
        server.close()


@contextmanager
def _adopting() -> Iterator[None]:
    """Context in which this process is the parent of what processes below it leave when they end."""
    _prctl(1)
    try:
        yield
    finally:
        _prctl(0)


def _prctl(adopts: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, adopts):
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


def receive(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = line.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the fork server has ended")
        data += part
    return data
