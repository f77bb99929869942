"""The cache of data made from the user's data: its place, and building a directory in it exactly once."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import UserError

log = logging.getLogger(__name__)

DOING = "doing"
"""The file in an unfinished directory with the builder's progress."""
LOOK = 1.0
"""Seconds between two reads of it by a process that waits."""


def default_cache_dir() -> Path:
    """Returns `$XDG_CACHE_HOME/shoal`, or `~/.cache/shoal`. Raises UserError for a user without a home."""
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root) / "shoal"
    try:
        return Path.home() / ".cache" / "shoal"
    except RuntimeError as error:  # a user without a name, as containers have them
        raise UserError(f"no cache for data: {error} Set HOME, or XDG_CACHE_HOME to a directory") from error


def fingerprint_of(*parts: object) -> str:
    """Returns a hash of `parts` (anything that JSON can write): 24 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def tell(unfinished: Path, text: str) -> None:
    """Reports the progress of the build in `unfinished`, here and in the processes that wait for it."""
    log.info(text)
    (unfinished / DOING).write_text(text)


def build_once(target: Path, build: Callable[[Path], None], intact: Callable[[Path], bool]) -> None:
    """Makes the directory `target`, unless it exists and is intact.

    target: the directory to make.
    build: fills an empty directory.
    intact: returns whether an existing directory is good.

    Any number of processes may call at once: one builds under a file lock, the others wait. The directory is built
    beside `target` and renamed, so a killed build leaves nothing that looks finished. A damaged directory is replaced;
    a process that has its files mapped keeps the old ones. Raises UserError where the cache cannot be written.
    """
    try:
        if intact(target):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(target.name + ".tmp")
        with _locked(FileLock(target.with_name(target.name + ".lock")), unfinished):
            if intact(target):
                return
            for leftover in (unfinished, target):
                if leftover.exists():
                    shutil.rmtree(leftover)
            unfinished.mkdir()
            build(unfinished)
            (unfinished / DOING).unlink(missing_ok=True)
            unfinished.rename(target)
    except OSError as error:
        raise UserError(
            f"the data cache {target} cannot be written: {error}. Free or allow the space, or give another place by "
            "XDG_CACHE_HOME (in Python also cache_dir=)"
        ) from error


@contextmanager
def _locked(lock: FileLock, unfinished: Path) -> Iterator[None]:
    """Holds the lock; while it waits, logs the progress of the process that has it."""
    said = ""
    while not lock.is_locked:
        with suppress(Timeout):
            lock.acquire(timeout=LOOK)
            break
        doing = ""
        with suppress(OSError):  # the build may just have ended
            doing = (unfinished / DOING).read_text()
        if doing not in ("", said):
            log.info("%s (another process does)", doing)
            said = doing
    try:
        yield
    finally:
        lock.release()
