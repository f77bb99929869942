"""Checks a checkpoint on disk, and lists those of a directory."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from shoal.checkpoint import directory as names
from shoal.checkpoint.manifest import FileRecord, read_manifest
from shoal.errors import CheckpointError

_sound: dict[Path, list[tuple[str, int, int, int]]] = {}
"""The checkpoints that this process has found sound, and the stamps of their files then (see `_stamps`)."""


def verify(path: Path | str) -> list[str]:
    """Reads every byte of the checkpoint; returns one sentence per problem, none if it is sound."""
    path = Path(path)
    stamps = _stamps(path)
    if not (found := problems(path, hashes=True)):
        _sound[path.resolve()] = stamps
    return found


def is_known_sound(path: Path) -> bool:
    """Returns whether this process has verified the checkpoint, and no file of it was written since."""
    return _sound.get(path.resolve(), []) == _stamps(path) != []


def _stamps(path: Path) -> list[tuple[str, int, int, int]]:
    """Returns name, inode, size and time of the last change of each file of the checkpoint, none if there is none."""
    try:
        files = sorted((file.name, file.stat()) for file in path.iterdir())
    except OSError:
        return []
    return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in files]


def problems(path: Path, hashes: bool) -> list[str]:
    """Returns the problems of a checkpoint; without `hashes` by existence and size only, which reads no contents."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    # hashlib releases the interpreter lock, so threads hash as fast as cores and disk allow.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda item: _problem(path / item[0], item[1], hashes), sorted(manifest.files.items()))
    return [problem for problem in found if problem]


def _problem(file: Path, record: FileRecord, hashes: bool) -> str | None:
    try:
        size = file.stat().st_size
        if size != record.bytes:
            return f"{file}: {size} bytes, {record.bytes} were written"
        if not hashes:
            return None
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"{file}: {error.strerror or error}"
    return None if digest == record.sha256 else f"{file}: contents changed since the save (SHA-256 differs)"


@dataclass(frozen=True)
class Row:
    """A line of `shoal ckpt ls`.

    world_size, bytes: as in the manifest; without one, 0 and the bytes found
    detail: the first problem
    """

    path: Path
    step: int
    when: datetime
    bytes: int
    world_size: int
    state: Literal["ok", "damaged", "partial"]
    detail: str = ""


def listing(directory: Path | str) -> list[Row]:
    """Returns the checkpoints of a directory, newest step first, judged by sizes only; `verify` reads their
    contents."""
    directory, rows = Path(directory), list[Row]()
    for step, path in names.completed(directory):
        with suppress(FileNotFoundError):  # a run that trains has meanwhile deleted it
            rows.append(_row(step, path))
    for step, path in names.unfinished(directory):
        with suppress(FileNotFoundError):  # ... or completed it
            rows.append(_bare(step, path, "partial", "the save did not finish, or is under way"))
    return sorted(rows, key=lambda row: row.step, reverse=True)


def _row(step: int, path: Path) -> Row:
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return _bare(step, path, "damaged", str(error))
    found = problems(path, hashes=False)
    when = datetime.fromtimestamp(manifest.created)
    state: Literal["ok", "damaged"] = "damaged" if found else "ok"
    return Row(path, step, when, manifest.bytes, manifest.world_size, state, found[0] if found else "")


def _bare(step: int, path: Path, state: Literal["damaged", "partial"], detail: str) -> Row:
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return Row(path, step, datetime.fromtimestamp(path.stat().st_mtime), size, 0, state, detail)
