"""Replaces a file at once, so that nobody reads half of it, and waits until a file is on the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from shoal.errors import UserError


def place_of(path: Path, option: str, example: str, is_one: Callable[[Path], bool]) -> Path:
    """Returns where a file that a user names with `option` lies, which another one may replace: behind links. Raises
    UserError where no file can be, for what is none, such as a device, and for a file of another kind than those of
    which `is_one` says so: a job's, say, that would be lost."""
    if (path.exists() and not path.is_file()) or not path.absolute().parent.is_dir():
        raise UserError(f"{option} {path}: give a file in a directory that there is, such as {example}")
    if path.exists() and not is_one(path):
        raise UserError(f"{option} {path} would replace a file of another kind: give another name, such as {example}")
    return path.resolve()


def sync(path: Path) -> None:
    """Waits until a file, or a directory's entries, are on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(path: Path, text: str, errors: str = "strict", end: str = "tmp") -> Path:
    """Writes `text` in UTF-8 in place of what `path` holds; returns `path`. Raises OSError where it cannot be written:
    what was there stays, and nothing beside it. `errors`: see `str.encode`. `end`: of the name of the file that is
    written first, which has to be another for each of several processes that may write at a time."""
    fresh = path.with_name(f"{path.name}.{end}")
    try:
        fresh.write_text(text, encoding="utf-8", errors=errors)
        os.replace(fresh, path)
    except OSError:
        if fresh.is_file():
            fresh.unlink()
        raise
    return path
