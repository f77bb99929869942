"""Append-only JSON Lines files, of which a crash can damage only the last line."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from shoal.errors import UserError

GENERATION = "membership"
"""The kind of the record with which a generation begins; its `step` is the last one before."""
_NEWEST, _BLOCK = 64, 1 << 16


def open_for_append(path: Path) -> io.FileIO:
    """Opens `path` for appending, unbuffered: one `write` is one system call, so a crash damages at most the last line.

    Removes an incomplete last line of an earlier process, since the next line would be joined to it and lost as well.
    Raises UserError where the file cannot be opened.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = io.FileIO(path, "a+")
    except OSError as error:
        raise UserError(
            f"{path} cannot be opened for writing: {error.strerror}. Choose another run directory"
        ) from error
    end = start = file.seek(0, os.SEEK_END)
    tail = b""
    while start and b"\n" not in tail:
        start = max(0, start - _BLOCK)
        file.seek(start)
        tail = file.read(end - start)
    tail = tail[tail.rfind(b"\n") + 1 :]
    if tail and parse(tail) is not None:
        file.write(b"\n")
    elif tail:
        file.truncate(end - len(tail))
    file.seek(0, os.SEEK_END)
    return file


def encode_lines(objects: Iterable[dict[str, Any]]) -> bytes:
    """Encodes each object as a line of strict JSON; NaN and infinities become "NaN", "Infinity" and "-Infinity"."""
    return b"".join(
        json.dumps(_finite(each), allow_nan=False, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace")
        + b"\n"
        for each in objects
    )


class JsonLog:
    """Appends dataclasses to `path`, one JSON object per line."""

    def __init__(self, path: Path | str) -> None:
        self._file = open_for_append(Path(path))

    def write(self, records: Iterable[Any]) -> None:
        """Appends `records` in one write of whole lines, so that several ranks may append to one file."""
        self._file.write(encode_lines(map(asdict, records)))

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns the objects of `path` in order, and the numbers (from 1) of lines that are not JSON objects.

    Neither includes an incomplete last line, which a killed or a running process leaves.
    """
    lines = path.read_bytes().split(b"\n")
    objects, damaged = [], []
    for number, line in enumerate(lines, start=1):
        parsed = parse(line)
        if parsed is not None:
            objects.append(parsed)
        elif line and number < len(lines):
            damaged.append(number)
    return objects, damaged


@dataclass(frozen=True)
class GoesOn:
    """The line of an attempt that goes on after the step `after`: what stands before it of later steps is trained
    again."""

    after: int


def read_standing(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of `path` that have a step, without those of steps that a later attempt has trained again;
    none where there is no such file."""
    found: list[dict[str, Any]] = []
    for line in read_lines(path)[0] if path.exists() else ():
        if line.keys() == {"after"}:
            found = [each for each in found if each["step"] <= line["after"]]
        elif "step" in line:
            found.append(line)
    return found


def as_float(value: Any) -> Any:
    """Decodes the strings of `encode_lines` for NaN and infinities, also in a dict; returns other values unchanged."""
    if isinstance(value, dict):
        return {key: as_float(each) for key, each in value.items()}
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def parse(line: bytes) -> dict[str, Any] | None:
    """Returns the object of a line; None where it is no JSON object."""
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def newest_step(lines: Sequence[bytes], kind: str, none: int) -> int:
    """Returns the newest step of the last records of a kind, `none` where there is no record. `lines`: the last one
    first. Looks at several, since a rank may record late what another one had no time to; few are parsed."""
    return max(islice(_steps(lines, kind), _NEWEST), default=none)


def _steps(lines: Sequence[bytes], kind: str) -> Iterator[int]:
    """The steps of the records of a kind, without those that a later generation has gone back from."""
    most = math.inf
    for line in lines:
        record = parse(line) or {} if any(f'"{each}"'.encode() in line for each in (kind, GENERATION)) else {}
        if record.get("kind") == GENERATION:
            most = min(most, record.get("step", most))
        elif record.get("kind") == kind and "step" in record and record["step"] <= most:
            yield record["step"]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
