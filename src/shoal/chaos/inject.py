"""Does a fault to the processes of a run, from outside wherever that is possible."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from shoal.chaos.faults import FLIPS, Fault
from shoal.chaos.nodes import Cluster, Node
from shoal.chaos.watch import Watch
from shoal.checkpoint.directory import unfinished
from shoal.errors import LaunchError, UserError
from shoal.jobs.names import DIRECTORY
from shoal.replace import replace_text

SMALL = 8192
"""Bytes up to which a process whose disk is "full" can write a file."""
_PIDFD_GETFD = 438  # the number of the system call, the same on all architectures
_STOPPED, _RUNNING = 0.045, 0.005
"""Seconds for which a slow rank stands still and runs, by turns."""
_SAVES = 30.0  # seconds in which a checkpoint is to begin


class Injector:
    """Injects faults into `cluster`.

    drill: the folder of jobs/drill.py.
    chosen: decides what a fault leaves open.
    """

    def __init__(self, cluster: Cluster, watch: Watch, drill: Path, chosen: random.Random) -> None:
        self._cluster, self._watch, self._drill, self._chosen = cluster, watch, drill, chosen
        self.moment = watch.now()
        """How far the run was when the last fault happened."""
        self._does: dict[str, Callable[[Fault], str]] = {
            "kill": lambda fault: self._signal(self._rank(fault), signal.SIGKILL),
            "stop": lambda fault: self._signal(self._rank(fault), signal.SIGSTOP),
            "drain": lambda fault: self._signal_node(self._node(fault), signal.SIGTERM),
            "node": lambda fault: self._signal_node(self._follower(fault), signal.SIGKILL),
            "coordinator": lambda fault: self._signal_node(cluster.leader(), signal.SIGKILL),
            "drop": lambda fault: self._shut(*self._rank(fault)),
            "hangup": lambda fault: self._shut(node := self._node(fault), psutil.Process(node.process.pid)),
            "slow": self._slow,
            "disk": self._fill_disk,
            "save": self._kill_at_save,
            "rejoin": self._kill_at_join,
            "two": self._kill_two,
        }

    def prepare(self, fault: Fault) -> None:
        """Brings about what a fault needs before it can happen: a node has to be away before it can come back."""
        if fault.kind == "rejoin" and len(self._cluster.living) > 1:
            before = self._watch.now()
            self._signal_node(self._follower(fault), signal.SIGKILL)
            self._watch.wait(lambda: self._watch.next_step(before, True), "the run does not go on without a node")

    def inject(self, fault: Fault) -> str:
        """Makes `fault` happen; returns whom it has met."""
        if fault.kind in FLIPS:
            return self._flip(fault)
        return self._does[fault.kind](fault)

    def _node(self, fault: Fault, among: list[Node] | None = None) -> Node:
        nodes = among or self._cluster.living
        return self._chosen.choice(nodes) if fault.node is None else nodes[fault.node % len(nodes)]

    def _follower(self, fault: Fault) -> Node:
        """Returns a node that does not coordinate, if there are several."""
        leader = self._cluster.leader()
        return self._node(fault, [node for node in self._cluster.living if node is not leader])

    def _rank(self, fault: Fault, node: Node | None = None) -> tuple[Node, psutil.Process]:
        node = node or self._node(fault, [each for each in self._cluster.living if each.ranks()])
        ranks = node.ranks()
        if not ranks:
            raise LaunchError(f"no rank of {self._named(node)} runs")
        return node, self._chosen.choice(ranks) if fault.rank is None else ranks[fault.rank % len(ranks)]

    def _signal(self, whom: tuple[Node, psutil.Process], number: signal.Signals) -> str:
        node, rank = whom
        self.moment = self._watch.now()
        rank.send_signal(number)
        return f"a rank of {self._named(node)}"

    def _signal_node(self, node: Node, number: signal.Signals) -> str:
        self.moment = self._watch.now()
        node.process.send_signal(number)
        return self._named(node)

    def _named(self, node: Node) -> str:
        return f"node {self._cluster.nodes.index(node)}"

    def _shut(self, node: Node, process: psutil.Process) -> str:
        self.moment = self._watch.now()
        count = shut_connections(process)
        return f"{count} connection(s) of {'a rank of ' * (process.pid != node.process.pid)}{self._named(node)}"

    def _slow(self, fault: Fault) -> str:
        node, rank = self._rank(fault)
        self.moment = self._watch.now()
        until = time.monotonic() + fault.seconds

        def turns() -> None:
            with suppress(psutil.NoSuchProcess):
                while time.monotonic() < until:
                    rank.suspend()
                    time.sleep(_STOPPED)
                    rank.resume()
                    time.sleep(_RUNNING)

        threading.Thread(target=turns, name="shoal-chaos-slow", daemon=True).start()
        return f"a rank of {self._named(node)}, for {fault.seconds:g} s"

    def _fill_disk(self, fault: Fault) -> str:
        """Lets a rank write only small files for a while. Not the one that records the run: it has to be watched."""
        record = str(self._cluster.run_dir / "metrics.jsonl")
        able = [
            (node, rank)
            for node in self._cluster.living
            for rank in node.ranks()
            if record not in {file.path for file in rank.open_files()}
        ]
        if not able:
            raise UserError("the disk of the only rank cannot be full: the run could not be watched. Give more ranks")
        node, rank = self._chosen.choice(able)
        self.moment = self._watch.now()
        _, hard = resource.prlimit(rank.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (SMALL, hard))

        def empty() -> None:
            with suppress(ProcessLookupError):
                resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (hard, hard))

        timer = threading.Timer(fault.seconds, empty)
        timer.daemon = True
        timer.start()
        return f"a rank of {self._named(node)}, for {fault.seconds:g} s"

    def _kill_at_save(self, fault: Fault) -> str:
        folder, deadline = self._cluster.run_dir / DIRECTORY, time.monotonic() + _SAVES
        while not unfinished(folder):
            if time.monotonic() > deadline:
                raise UserError(f"no checkpoint has begun for {_SAVES:.0f} s: give the job a smaller run.save_every")
            time.sleep(0.0005)
        return self._signal(self._rank(fault), signal.SIGKILL)

    def _kill_at_join(self, fault: Fault) -> str:
        new = self._cluster.join()
        self._watch.wait(new.ranks, "no rank of the node that joins has started")
        time.sleep(self._chosen.uniform(0.0, 0.5))
        return self._signal(self._rank(fault), signal.SIGKILL) + f", while {self._named(new)} joins"

    def _kill_two(self, fault: Fault) -> str:
        nodes = self._cluster.living
        both = self._chosen.sample(nodes, 2) if len(nodes) > 1 else nodes
        ranks = [self._rank(fault, node)[1] for node in both] if len(both) > 1 else nodes[0].ranks()[:2]
        self.moment = self._watch.now()
        for rank in ranks:
            rank.kill()
        return f"{len(ranks)} rank(s) of {' and '.join(map(self._named, both))}"

    def _flip(self, fault: Fault) -> str:
        train = {path.name.split("-")[1] for path in self._drill.glob("samples-*")}
        nodes = self._cluster.living if fault.node is None else [self._node(fault)]
        able = [(node, rank) for node in nodes for rank in node.ranks() if str(rank.pid) in train]  # not only get ready
        node, rank = self._chosen.choice(able) if fault.rank is None else able[fault.rank % len(able)]
        asked = self._drill / f"flip-{rank.pid}"
        what = f"{fault.kind} {self._chosen.randrange(1 << 30)}"
        self.moment = self._watch.now()
        replace_text(asked, what)
        self._watch.wait(lambda: not asked.exists(), "the rank has not flipped its bit")
        return f"a rank of {self._named(node)}"


def shut_connections(process: psutil.Process) -> int:
    """Shuts the TCP connections of another process in both directions, as a cable that is pulled and a kernel that
    gives up; returns how many. Raises UserError where the system does not let us."""
    found = [each.fd for each in process.net_connections(kind="tcp") if each.status == psutil.CONN_ESTABLISHED]
    library, handle = ctypes.CDLL(None, use_errno=True), os.pidfd_open(process.pid)
    try:
        shut = 0
        for number in found:
            descriptor = library.syscall(_PIDFD_GETFD, handle, number, 0)
            if descriptor < 0 and ctypes.get_errno() == errno.EBADF:
                continue  # the process has closed it meanwhile
            if descriptor < 0:
                why = os.strerror(ctypes.get_errno())
                raise UserError(f"the connections of process {process.pid} cannot be shut: {why}. Leave this fault out")
            with socket.socket(fileno=descriptor) as end, suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
                shut += 1
    finally:
        os.close(handle)
    return shut
