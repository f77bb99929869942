"""The names inside a directory of checkpoints, and the renames that make a save atomic.

step-00000100        complete: it got its name by one rename, after everything in it was on disk
step-00000100.tmp    being written, or being deleted; a leftover comes from a crash
step-00000100.old    the earlier save of a step that is saved again, for the moment between two renames
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from shoal.checkpoint.manifest import MANIFEST
from shoal.replace import sync

_STEP = re.compile(r"step-(\d{8,})(\.tmp|\.old)?")


def step_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def is_checkpoint(path: Path) -> bool:
    """Returns whether `path` is a checkpoint, not a directory of them: by its name, or its manifest under another."""
    return _STEP.fullmatch(path.name) is not None or (path / MANIFEST).is_file()


def tmp_of(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _old_of(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def _entries(directory: Path, suffix: str | None) -> list[tuple[int, Path]]:
    """Returns (step, path) of the entries with that suffix, newest step first; none if the directory is missing."""
    if not directory.is_dir():
        return []
    found = ((_STEP.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted(
        ((int(match[1]), path) for match, path in found if match and match[2] == suffix and path.is_dir()), reverse=True
    )


def completed(directory: Path) -> list[tuple[int, Path]]:
    """Returns (step, path) of the complete checkpoints, newest step first, whether sound or damaged since."""
    stranded = [(step, path) for step, path in _entries(directory, ".old") if not path.with_suffix("").exists()]
    return sorted(_entries(directory, None) + stranded, reverse=True)


def unfinished(directory: Path) -> list[tuple[int, Path]]:
    """Returns (step, path) of saves that have not finished, newest step first."""
    return _entries(directory, ".tmp")


def clean(directory: Path) -> None:
    """Repairs a directory after a crash: removes half-written checkpoints, and gives one caught between two renames its
    name.

    No save into `directory` may be under way.
    """
    for _, path in unfinished(directory):
        shutil.rmtree(path)
    for _, path in _entries(directory, ".old"):
        if path.with_suffix("").exists():
            shutil.rmtree(path)
        else:
            path.rename(path.with_suffix(""))


def publish(path: Path) -> None:
    """Gives the finished `path`.tmp its name, durably, and replaces a checkpoint of that name; one of the two always
    exists."""
    sync(tmp_of(path))
    if path.exists():
        path.rename(_old_of(path))
    tmp_of(path).rename(path)
    sync(path.parent)
    shutil.rmtree(_old_of(path), ignore_errors=True)


def remove(path: Path) -> None:
    """Deletes a checkpoint so that a crash in the middle leaves a .tmp, not a damaged one under a good name."""
    shutil.rmtree(tmp_of(path), ignore_errors=True)  # of a save of the same step that has crashed
    path.rename(tmp_of(path))
    shutil.rmtree(tmp_of(path), ignore_errors=True)
