"""The actor of a node on Ray: it starts the node's supervisor as a process of its own, and tells how it goes.

    driver (ray_nodes.py) --> actor --> supervisor --> ranks

If the actor's process ends in any way, the kernel ends the supervisor, and with that the ranks: a lost actor is a lost
node. The supervisor writes lines to a pipe: MEMBER with its address, and OVER with the exit code. An actor imports no
torch, since a node that comes back is to be there soon.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TextIO

from shoal.errors import CheckpointError, UserError

MEMBER, OVER = "member", "over"


@dataclass(frozen=True)
class Ended:
    """How a supervisor has ended. code: its exit code, negative for a signal. over: it was told that the job is over,
    or may leave; else it was killed, or has given up."""

    code: int
    over: bool

    def leaves(self, alone: bool) -> bool:
        """Whether the node leaves while others go on, in memory where its last checkpoint failed. `alone`: it is the
        only one."""
        return self.code == 128 + signal.SIGTERM or (self.code == CheckpointError.exit_code and not alone)


@dataclass(frozen=True)
class Order:
    """What a node is to do.

    command: arguments for `python`, to which three are added: the addresses of `members` with commas between them, ""
        where the node founds the job; the address of its host; and the descriptor of the pipe.
    members: where supervisors listen. ranks: how many this one starts. folder: where it runs.
    variables: the driver's. Those of the host win. without: variables that it has not, from wherever.
    """

    command: list[str]
    members: list[str]
    ranks: int
    folder: str
    variables: Mapping[str, str]
    without: Collection[str]


class Host:
    """The actor. The driver calls `begin`, then `wait`; and `signal` at any time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: TextIO | None = None
        self._said: dict[str, str] = {}

    def begin(self, order: Order) -> str:
        """Starts the supervisor; returns where it listens once it is a member, "" where it ends before."""
        import ray

        if not os.path.isdir(order.folder):
            print(f"error: {missing(order.folder)}", file=sys.stderr, flush=True)
            return ""
        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1.0)
        reading, writing = os.pipe()
        arguments = [*order.command, ",".join(order.members), ray.util.get_node_ip_address(), str(writing)]
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment(order, os.environ, cpus),
            cwd=order.folder,
            stdin=subprocess.DEVNULL,
            pass_fds=(writing,),
        )
        os.close(writing)
        self._pipe = os.fdopen(reading)
        return self._hear(MEMBER)

    def wait(self) -> Ended:
        """Returns how the supervisor has ended, once it has."""
        if self._process is None:
            return Ended(UserError.exit_code, False)
        over = self._hear(OVER)
        code = self._process.wait()
        return Ended(int(over), True) if over else Ended(code, False)

    def signal(self, number: int) -> None:
        """Sends the supervisor a signal, where it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def _hear(self, word: str) -> str:
        """Reads up to a line of that kind; returns what it says, "" where none comes."""
        assert self._pipe is not None
        while word not in self._said and (line := self._pipe.readline()):
            kind, _, text = line.strip().partition(" ")
            self._said[kind] = text
        return self._said.get(word, "")


def missing(folder: str) -> str:
    """Says that a host does not see the job's folder."""
    return (
        f"this host has no folder {folder}, where the job was started. All nodes need to see it, the job file and its "
        "run.dir under the same paths, e.g. on a network file system"
    )


def environment(order: Order, here: Mapping[str, str], cpus: float) -> dict[str, str]:
    """Returns the variables of a supervisor. here: the actor's. cpus: what it has of its host; Ray has set as many
    threads, which the ranks divide."""
    found = {**order.variables, **here, "SHOAL_LAUNCHER": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    if found.get("OMP_NUM_THREADS") == str(max(1, int(cpus))):
        found["OMP_NUM_THREADS"] = str(max(1, int(cpus / order.ranks)))
    return {name: value for name, value in found.items() if name not in order.without}
