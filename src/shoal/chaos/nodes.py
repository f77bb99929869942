"""The nodes of a job as processes of this host, which see each other over loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from shoal.comm.secret import VARIABLE as SECRET
from shoal.comm.secret import new_secret
from shoal.elastic.events import Joined, TookOver
from shoal.elastic.journal import read
from shoal.errors import LaunchError

MARK = "SHOAL_CHAOS"
"""Every process of the run inherits this variable, so that orphans are found too."""
_HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
_PATIENCE = 60.0


class Node:
    """A supervisor that `shoal train` with `arguments` is; its output goes to `log`."""

    def __init__(self, arguments: list[str], env: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shoal.cli", "train", *arguments],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def ranks(self) -> list[psutil.Process]:
        """Returns its rank processes, the oldest first."""
        found = []
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                with suppress(psutil.Error):
                    if child.status() != psutil.STATUS_ZOMBIE and not any(
                        w in " ".join(child.cmdline()) for w in _HELPERS
                    ):
                        found.append(child)
        return sorted(found, key=lambda each: (each.create_time(), each.pid))

    @property
    def said(self) -> str:
        """What it has written so far."""
        return self.log.read_text(errors="replace")


class Cluster:
    """The nodes of one run, of which there are to be `size`, each with `nproc` ranks.

    job: `shoal train` gets it, with these `assignments`.
    least: of nodes that train.
    folder: for the run, its nodes' output, their temporary files.
    variables: of all processes, beside those of this one.
    """

    def __init__(
        self,
        job: Path,
        assignments: list[str],
        least: int,
        size: int,
        nproc: int,
        folder: Path,
        variables: Mapping[str, str],
    ) -> None:
        self.run_dir, self.size, self._nproc, self._folder = folder / "run", size, nproc, folder
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        secret = new_secret()
        self._env = {**os.environ, MARK: self.mark, SECRET: secret, "TMPDIR": str(self.temporary), **variables}
        self.nodes: list[Node] = []
        given = [f"--set={each}" for each in (*assignments, f'run.dir="{self.run_dir}"')]
        self._add([str(job), f"--nodes={least}:{size}", f"--nproc={nproc}", *given])
        deadline = time.monotonic() + _PATIENCE
        while (found := re.search(r"--join (\S+:\d+)", self.nodes[0].said)) is None:
            if not self.nodes[0].lives or time.monotonic() > deadline:
                raise LaunchError(f"the first node does not start:\n{self.nodes[0].said}")
            time.sleep(0.02)
        for _ in range(size - 1):
            self._add([f"--join={found[1]}", f"--nproc={nproc}"])

    def _add(self, arguments: list[str]) -> Node:
        self.nodes.append(Node(arguments, self._env, self._folder / f"node{len(self.nodes)}.log"))
        return self.nodes[-1]

    @property
    def living(self) -> list[Node]:
        """The nodes whose supervisor lives, in the order in which they came."""
        return [node for node in self.nodes if node.lives]

    def join(self) -> Node:
        """Starts another node, which joins."""
        _, host, port = coordinator(self.run_dir)
        return self._add([f"--join={host}:{port}", f"--nproc={self._nproc}"])

    def leader(self) -> Node:
        """Returns the node that coordinates."""
        pid, _, _ = coordinator(self.run_dir)
        return next((node for node in self.living if node.process.pid == pid), self.living[0])

    def wait(self, seconds: float) -> bool:
        """Waits until all supervisors have ended; returns whether they have."""
        deadline = time.monotonic() + seconds
        while self.living and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.living

    def marked(self) -> list[psutil.Process]:
        """Returns all processes of the run that live."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                ours = process.pid != os.getpid() and process.environ().get(MARK) == self.mark
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def end(self) -> None:
        """Kills whatever is left of it."""
        for process in self.marked():
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        for node in self.nodes:
            node.process.wait()


@contextmanager
def ended(cluster: Cluster) -> Iterator[Cluster]:
    """Leaves no process of `cluster`, whatever happens inside."""
    try:
        yield cluster
    finally:
        cluster.end()


def coordinator(run_dir: Path) -> tuple[int, str, int]:
    """Returns who coordinates the job of a run, by its newest journal: process id, host and port."""
    newest = max((run_dir / "membership").glob("*.journal"), key=lambda path: path.stat().st_ctime_ns)
    name, places = "", dict[str, tuple[str, int]]()
    for event in read(newest):
        if isinstance(event, Joined):
            places[event.name] = event.host, event.port
            name = name or event.name
        elif isinstance(event, TookOver):
            name = event.name
    return int(newest.stem.rpartition("-")[2]), *places[name]
