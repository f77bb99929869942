"""A job that `recovery` holds from outside: processes are found, killed and stopped, committed steps are read from
files."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

WORKERS = 4


@dataclass(frozen=True)
class Commit:
    """A committed step: Unix time, its number, how many workers made it."""

    time: float
    step: int
    world: int


class Running:
    """A contender that trains in `folder`.

    starters: the processes that were started, in order.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.starters: list[subprocess.Popen[bytes]] = []
        self._read: dict[Path, int] = {}
        self._commits: list[Commit] = []

    def start(self, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Starts a process, whose output goes to a file."""
        with (self.folder / f"process{len(self.starters)}.log").open("wb") as log:
            given = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=given, start_new_session=True)
        self.starters.append(process)
        return process

    def commits(self) -> list[Commit]:
        """All commits so far, each step once from each worker, in the order of their times."""
        for path in self.folder.glob("commits-*"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                when, step, world = line.split()
                self._commits.append(Commit(float(when), int(step), int(world)))
        self._commits.sort(key=lambda each: each.time)
        return self._commits

    def forget(self) -> None:
        """Forgets all commits but the newest one, so that those to come are found soon."""
        del self._commits[:-1]

    def workers(self) -> list[psutil.Process]:
        """The processes that train, the oldest first."""
        found = []
        for path in self.folder.glob("commits-*"):
            with suppress(psutil.Error):
                process = psutil.Process(int(path.name.rpartition("-")[2]))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return sorted(found, key=lambda each: (each.create_time(), each.pid))

    def node(self) -> list[psutil.Process]:
        """The processes of the node that is lost: not the one that coordinates."""
        raise NotImplementedError

    def coordinator(self) -> list[psutil.Process]:
        """The process that coordinates, with those that live and die with it on its node."""
        raise NotImplementedError

    comes_back = True
    """Whether `come_back` can bring back what coordinates: else no fault comes after its loss."""

    def come_back(self) -> None:
        """Starts the node again that was lost."""
        raise NotImplementedError

    def revive(self) -> None:
        """Starts a worker again that was killed, where the framework leaves that to a scheduler."""

    def end(self) -> None:
        """Kills all that is left."""
        left = [process for starter in self.starters for process in family(starter.pid)] + self.workers()
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        for starter in self.starters:
            starter.wait()


def family(pid: int) -> list[psutil.Process]:
    """The process and all below it."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(processes: list[psutil.Process], number: signal.Signals = signal.SIGKILL) -> None:
    """Sends a signal to all at once."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)
