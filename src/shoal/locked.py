"""A lock between processes of a host, on a folder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOOK = 0.05


@contextmanager
def locked(folder: Path, patience: float | None = None) -> Iterator[None]:
    """Keeps other processes, threads and forks that lock `folder` waiting, for `patience` seconds where that is given;
    where the file system has no locks, nobody waits. Raises OSError where it cannot be opened."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            _lock(descriptor, patience)
        yield
    finally:
        os.close(descriptor)  # releases the lock, which belongs to what was opened here


def _lock(descriptor: int, patience: float | None) -> None:
    """Locks what is open there, once it is free; not at all where that takes longer than `patience`."""
    until = None if patience is None else time.monotonic() + patience
    while until is None or time.monotonic() < until:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if until is None else fcntl.LOCK_NB))
            break
        time.sleep(LOOK)
