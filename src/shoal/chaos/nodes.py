"""The nodes of a job as processes of this host, which see each other over loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from shoal.comm.secret import VARIABLE as SECRET
from shoal.comm.secret import new_secret
from shoal.elastic.events import Joined, TookOver
from shoal.elastic.journal import read
from shoal.errors import LaunchError, UserError
from shoal.launch.fork_server import NAME as FORK_SERVER

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
                [sys.executable, "-m", "shoal.launch.rank", "-m", "shoal.cli", "train", *arguments],
                env={**env, "SHOAL_LAUNCHER": str(os.getpid())},  # it ends with this process
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
        return ranks_of(self.process.pid)

    @property
    def said(self) -> str:
        """What it has written so far."""
        return self.log.read_text(errors="replace")


def ranks_of(supervisor: int) -> list[psutil.Process]:
    """Returns the rank processes of the process `supervisor`, the oldest first."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(supervisor).children():
            with suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE and not _helps(child):
                    found.append(child)
    return sorted(found, key=lambda each: (each.create_time(), each.pid))


def _helps(process: psutil.Process) -> bool:
    line = " ".join(process.cmdline())
    return process.name() == FORK_SERVER or any(each in line for each in _HELPERS)


class Cluster:
    """The nodes of one run, of which there are to be `size`, each with `nproc` ranks; at first there is one.

    job: `shoal train` gets it, with these `assignments`.
    nodes: the least number of nodes that train, and `size`.
    folder: for their output and temporary files, and for the run unless `run_dir` is given.
    variables: of all processes, beside those of this one.
    """

    def __init__(
        self,
        job: Path,
        assignments: Sequence[str],
        nodes: tuple[int, int],
        nproc: int,
        folder: Path,
        variables: Mapping[str, str],
        run_dir: Path | None = None,
    ) -> None:
        least, self.size = nodes
        self.run_dir, self._folder = run_dir or folder / "run", folder
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        try:
            self.temporary.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error}. Give another --dir") from error
        self._env = {**os.environ, MARK: self.mark, SECRET: new_secret(), "TMPDIR": str(self.temporary), **variables}
        self._env.pop("RAY_ADDRESS", None)  # else Ray would place them
        self.nodes: list[Node] = []
        given = [f"--set={each}" for each in (*assignments, f'run.dir="{self.run_dir}"')]
        first = self._add([str(job), f"--nodes={least}:{self.size}", f"--nproc={nproc}", *given])
        deadline = time.monotonic() + _PATIENCE
        while (found := re.search(r"--join (\S+:\d+)", first.said)) is None:
            if not first.lives or time.monotonic() > deadline:
                raise LaunchError(f"the first node does not start:\n{first.said}")
            time.sleep(0.02)
        self._first, self._nproc = found[1], nproc

    def _add(self, arguments: list[str]) -> Node:
        self.nodes.append(Node(arguments, self._env, self._folder / f"node{len(self.nodes)}.log"))
        return self.nodes[-1]

    def join(self, nproc: int | None = None) -> Node:
        """Starts another node, which joins with `nproc` ranks, by default as many as the first one has."""
        leads = coordinator(self.run_dir)
        return self._add([f"--join={leads[1] if leads else self._first}", f"--nproc={nproc or self._nproc}"])

    @property
    def living(self) -> list[Node]:
        """The nodes whose supervisor lives, in the order in which they came."""
        return [node for node in self.nodes if node.lives]

    def leader(self) -> Node:
        """Returns the node that coordinates."""
        leads = coordinator(self.run_dir)
        return next((node for node in self.living if leads and node.process.pid == leads[0]), self.living[0])

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


def coordinator(run_dir: Path) -> tuple[int, str] | None:
    """Returns who coordinates the job of a run, by its newest journal: process id and address; None where nobody does
    yet."""
    journals = sorted((run_dir / "membership").glob("*.journal"), key=lambda path: path.stat().st_ctime_ns)
    name, places = "", dict[str, str]()
    for event in read(journals[-1]) if journals else ():
        if isinstance(event, Joined):
            places[event.name] = f"{event.host}:{event.port}"
            name = name or event.name
        elif isinstance(event, TookOver):
            name = event.name
    return (int(journals[-1].stem.rpartition("-")[2]), places[name]) if name else None
