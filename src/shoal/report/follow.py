"""Reads `metrics.jsonl` while it grows: each line is decoded once."""

from __future__ import annotations

from pathlib import Path

from .jsonl import parse
from .metrics import Record, decode

TAIL = 1 << 16
"""Bytes at the end of a record among which its last step is looked for."""


class Follower:
    """The records that `path` has so far.

    An incomplete last line is read again once it is complete, or once a resumed run has cut it off. A file that was
    replaced or shortened is read anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file, self._offset = 0, 0
        self.records: list[Record] = []
        self.damaged = 0
        """Number of whole lines that are no record."""

    def read(self) -> bool:
        """Takes in what was written since; returns whether there was anything. A missing file has no records."""
        try:
            with self._path.open("rb") as file:
                state = self._path.stat()
                if state.st_ino != self._file or state.st_size < self._offset:
                    self._file, self._offset = state.st_ino, 0
                    self.records, self.damaged = [], 0
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return False
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            parsed = parse(line)
            record = None if parsed is None else decode(parsed)
            if record is not None:
                self.records.append(record)
            else:
                self.damaged += 1
        return bool(whole)


def last_step(path: Path) -> int | None:
    """Returns the last step in a record, from its end alone; None where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    steps = (parsed for line in reversed(lines) if (parsed := parse(line)) is not None and parsed.get("kind") == "step")
    return next((step["step"] for step in steps), None)
