"""The cache of things made once from the user's data: where it is, and how a directory in it comes to be exactly once."""

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
"""The file in an unfinished directory that says what its builder is at."""
LOOK = 1.0
"""Seconds between two looks at it of a process that waits."""


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/shoal`, or `~/.cache/shoal`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"


def fingerprint_of(*parts: object) -> str:
    """24 hexadecimal digits that stand for `parts` (anything that JSON can write)."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def tell(unfinished: Path, text: str) -> None:
    """Says what the build in `unfinished` is at, here and in the processes that wait for it."""
    log.info(text)
    (unfinished / DOING).write_text(text)


def build_once(target: Path, build: Callable[[Path], None], intact: Callable[[Path], bool]) -> None:
    """Makes the directory `target` by `build(empty_directory)`, unless it is there and `intact(target)`.

    Any number of processes may call at once: one builds under a file lock, the others wait and find it done. The directory
    is built beside its place and renamed, so a killed build leaves nothing that looks finished. What is there but not
    intact is replaced; a process that has its files mapped keeps the old ones.
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
            f"the data cache {target} cannot be written: {error}. Free or allow the space, or give another place by cache_dir"
        ) from error


@contextmanager
def _locked(lock: FileLock, unfinished: Path) -> Iterator[None]:
    """Holds the lock; who waits for it says what the process that has it is at."""
    said = ""
    while not lock.is_locked:
        with suppress(Timeout):
            lock.acquire(timeout=LOOK)
            break
        doing = ""
        with suppress(OSError):  # it may just have ended
            doing = (unfinished / DOING).read_text()
        if doing not in ("", said):
            log.info("%s (another process does)", doing)
            said = doing
    try:
        yield
    finally:
        lock.release()
