"""Finds what a test session leaves behind: processes, also those without a parent, and files in shared memory."""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

_MARK = "SHOAL_TEST_SESSION"  # every process that a test starts inherits it, so an orphan is found too
_OURS = os.environ[_MARK] = uuid.uuid4().hex
_MULTIPROCESSING = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")  # they end with this process
_SHM = Path("/dev/shm")


def end_processes(patience: float = 5.0) -> list[str]:
    """Lines on the session's processes that still live after `patience` seconds; ends them."""
    deadline = time.monotonic() + patience
    while (left := _processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    lines = []
    for process in left:
        with suppress(psutil.Error):
            lines.append(f"process {process.pid}: {' '.join(process.cmdline())}")
            process.kill()
    return lines


def _processes() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            mine = process.pid != os.getpid() and process.environ().get(_MARK) == _OURS
            if (
                mine
                and process.status() != psutil.STATUS_ZOMBIE
                and not any(w in " ".join(process.cmdline()) for w in _MULTIPROCESSING)
            ):
                found.append(process)
    return found


class SharedMemory:
    """The files in shared memory at the moment it is made."""

    def __init__(self) -> None:
        self.before = _shared_memory_files()

    def left(self) -> list[str]:
        """Lines on the files made since, but for those that a process of somebody else holds."""
        new = _shared_memory_files() - self.before - _held_by_others()
        still = [name for name in sorted(new) if os.path.exists(name)]  # others have let go of theirs by now
        return [f"shared memory file {name}" for name in still]


def _shared_memory_files() -> set[str]:
    """All but multiprocessing's own semaphores, which its tracker removes when this process ends: torch.compile makes
    some."""
    found = [path for path in _SHM.rglob("*") if path.is_file()] if _SHM.is_dir() else []
    return {str(path) for path in found if not path.name.startswith("sem.mp-")}


def _held_by_others() -> set[str]:
    held: set[str] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) != _OURS:
                held |= {mapping.path for mapping in process.memory_maps()} | {
                    file.path for file in process.open_files()
                }
    return held
