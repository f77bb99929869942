"""Writes and reads `manifest.json`, the last file written into a checkpoint, which says what the others must be."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.comm.wire import sent
from shoal.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
_LATEST = 253402300800
"""The year 10000, in seconds since the epoch, which `datetime` cannot represent."""


@sent
@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 (hex) of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a manifest.

    step: number of committed steps in the saved state
    world_size: number of ranks that wrote it
    created: seconds since the epoch
    files: by name, all but the manifest itself
    extra: JSON state of the caller
    """

    step: int
    world_size: int
    created: float
    files: Mapping[str, FileRecord]
    extra: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes and fsyncs the manifest, with a hash over its own text: a flipped digit in `extra` is damage too. Raises
    OSError."""
    content = {
        "format": FORMAT,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "created": manifest.created,
        "files": {name: vars(record) for name, record in sorted(manifest.files.items())},
        "extra": manifest.extra,
    }
    with (path / MANIFEST).open("w") as stream:
        json.dump({**content, "sha256": _digest(content)}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def read_manifest(path: Path) -> Manifest:
    """Returns the manifest of the checkpoint at `path`. Raises CheckpointError if it is missing, damaged, or of another
    format."""
    path = Path(path)
    try:
        content = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: {MANIFEST} is missing; this is not a checkpoint, or its save did not finish"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {MANIFEST} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.pop("sha256", None) != _digest(content):
        raise CheckpointError(f"{path}: {MANIFEST} is damaged: its contents do not match its own hash")
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format {content.get('format')}, this Shoal reads {FORMAT}; load it with the Shoal that wrote it, "
            "or a newer one"
        )
    if problem := _problem(content):
        raise CheckpointError(f"{path}: {MANIFEST} is not one that a save writes: {problem}")
    files = {name: FileRecord(record["bytes"], record["sha256"]) for name, record in content["files"].items()}
    return Manifest(content["step"], content["world_size"], content["created"], files, content["extra"])


def _problem(content: dict[str, Any]) -> str:
    """Returns what is of another type or range than a save writes; "" if nothing is."""
    for key, least in (("step", 0), ("world_size", 1), ("created", 0)):
        value = content.get(key)
        if not _is_number(value, least, (int, float) if key == "created" else int):
            return f"{key} is {value!r:.100}"
    if not isinstance(content.get("extra"), dict):
        return f"extra is {content.get('extra')!r:.100}"
    files = content.get("files")
    if not isinstance(files, dict):
        return f"files is {files!r:.100}"
    for name, record in files.items():
        if not is_beside(name):
            return f"it names the file {name!r:.100}, which is not one beside it"
        fits = isinstance(record, dict) and record.keys() == {"bytes", "sha256"} and isinstance(record["sha256"], str)
        if not (fits and _is_number(record["bytes"], 0, int)):
            return f"of {name!r:.100} it says {record!r:.100}"
    return ""


def is_beside(name: str) -> bool:
    """True for the name of a file in the checkpoint's own directory."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _is_number(value: Any, least: int, kind: Any) -> bool:
    return (
        isinstance(value, kind) and not isinstance(value, bool) and least <= value < (2**63 if kind is int else _LATEST)
    )


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
