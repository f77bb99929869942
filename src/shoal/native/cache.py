"""The cache of compiled libraries. One is loaded only if nobody else could write it and its checksum is right.

$XDG_CACHE_HOME/shoal/native     or ~/.cache/shoal/native; where that cannot be trusted or used:
$TMPDIR/shoal-native-<uid>       where that cannot be either: a fresh folder, removed with the process
    NAME.so, NAME.so.sha256
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from shoal.locked import locked
from shoal.replace import sync

Build = Callable[[Path], None]
"""Writes a library to a path. Raises RuntimeError if it cannot be built, OSError if it cannot be written."""


def load(name: str, build: Build) -> ctypes.CDLL:
    """Loads the library `name`, built if it is not in the cache or is damaged.

    Raises RuntimeError as `build` does, OSError if no folder can be used.
    """
    try:
        return _load_from(_usual_folder(), name, build)
    except OSError as error:
        problem = error
    for folder in _private_folders():
        with suppress(OSError):
            library = _load_from(folder, name, build)
            warnings.warn(f"Shoal's kernels are kept in {folder}, since {problem}", stacklevel=4)
            return library
    raise problem


def _load_from(folder: Path, name: str, build: Build) -> ctypes.CDLL:
    _make(folder)
    target = folder / f"{name}.so"
    if not _is_whole(target):
        with locked(folder):
            if not _is_whole(target):  # another rank may have built it meanwhile
                _build(target, build)
    if not _is_whole(target):
        raise OSError(f"{target} is not this user's alone although this user has just made it")
    return ctypes.CDLL(str(target))


def _usual_folder() -> Path:
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root) / "shoal" / "native"
    try:
        return Path.home() / ".cache" / "shoal" / "native"
    except RuntimeError as error:  # a user without a name or a home, as containers have them
        raise OSError(str(error)) from error


def _private_folders() -> Iterator[Path]:
    yield Path(tempfile.gettempdir()) / f"shoal-native-{os.geteuid()}"
    fresh = tempfile.mkdtemp(prefix="shoal-native-")
    atexit.register(shutil.rmtree, fresh, ignore_errors=True)
    yield Path(fresh)


def _make(folder: Path) -> None:
    """Makes `folder` if it does not exist. Raises OSError if others could have put files there, or could replace it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    above = folder.parent.stat()
    if above.st_uid not in (0, os.geteuid()):
        raise OSError(
            f"{folder.parent} belongs to another user (uid {above.st_uid}); set XDG_CACHE_HOME to a folder of your own"
        )
    if problem := _problem(folder.lstat(), stat.S_ISDIR):
        raise OSError(f"{folder} {problem}; remove it, or set XDG_CACHE_HOME to a folder of your own")


def _problem(status: os.stat_result, is_kind: Callable[[int], bool]) -> str:
    """Returns why a file with this status cannot be trusted, or ""."""
    if not is_kind(status.st_mode):
        return "is not what it should be (a link?)"
    if status.st_uid != os.geteuid():
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def _is_whole(target: Path) -> bool:
    """Returns whether the file exists, is this user's alone, and has the checksum of the file beside it.

    A truncated library would load, and kill the process when its missing pages are touched.
    """
    checksum = _checksum_of(target)
    try:
        if any(_problem(path.lstat(), stat.S_ISREG) for path in (target, checksum)):
            return False
        return checksum.read_text().strip() == _digest(target)
    except (OSError, UnicodeDecodeError):
        return False


def _build(target: Path, build: Build) -> None:
    """Builds a library and its checksum. Both reach the disk before they get their names; a crash in between leaves a
    mismatch, which is built anew.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        fresh = Path(scratch) / target.name
        build(fresh)
        checksum = _checksum_of(fresh)
        checksum.write_text(_digest(fresh))
        for path in (fresh, checksum):
            path.chmod(0o700)
            sync(path)
        fresh.replace(target)
        checksum.replace(_checksum_of(target))
    sync(target.parent)


def _checksum_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
