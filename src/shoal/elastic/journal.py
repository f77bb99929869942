"""The journal of a membership: its events, one line each, written to the disk before a decision is told to anybody.

    checksum of this line and the one before it, a space, the event as JSON

A crash can tear only the last line, which is then dropped: nobody was told of it. Any other damage is an error.
Standbys get the same lines, so that the machine which they replay is the coordinator's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from shoal.elastic.events import EVENTS, Event, Limits, TookOver
from shoal.elastic.membership import Membership
from shoal.elastic.records import Malformed, decode, encode
from shoal.errors import LaunchError

_CHECK = 16  # hexadecimal digits


class Journal:
    """Lines of events in memory and, where `path` is given, in that file, which is made anew.

    Raises LaunchError where the file cannot be written.
    """

    def __init__(self, path: Path | None = None, lines: Sequence[str] = ()) -> None:
        self.lines: list[str] = []
        self._path, self._file = path, -1
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise _unwritable(path, error) from error
        self._write(list(lines))

    def append(self, events: Iterable[Event]) -> None:
        """Adds events; they are on the disk when this returns."""
        new: list[str] = []
        for event in events:
            text = encode(event).decode("ascii")
            before = new[-1] if new else self.lines[-1] if self.lines else ""
            new.append(f"{_check(before, text)} {text}")
        self._write(new)

    def take(self, line: str) -> Event:
        """Adds a line of another journal and returns its event. Raises Malformed where it does not follow the last."""
        event = _read(self.lines[-1] if self.lines else "", line)
        self._write([line])
        return event

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, lines: list[str]) -> None:
        self.lines += lines
        if self._file < 0 or not lines:
            return
        assert self._path is not None
        try:
            data = memoryview("".join(f"{line}\n" for line in lines).encode("ascii"))
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            raise _unwritable(self._path, error) from error


def read(path: Path) -> list[Event]:
    """Returns the events of a journal without a torn last line. Raises LaunchError for any other damage."""
    events: list[Event] = []
    before = ""
    for number, line in enumerate(_lines(path), start=1):
        try:
            events.append(_read(before, line))
        except ValueError as error:
            raise LaunchError(f"{path}: line {number} is damaged ({error})") from error
        before = line
    return events


def written(folder: Path) -> list[list[str]]:
    """Returns the lines of all journals in `folder`; none where there is no such folder or it cannot be read, as where
    the run directory is not the same on all hosts."""
    try:
        return [_lines(path) for path in sorted(folder.glob("*.journal"))]
    except OSError:
        return []


def continued(have: Sequence[str], lines: Sequence[str]) -> list[str]:
    """Returns what follows the lines `have` in those of another journal, up to a damaged one; nothing where that does
    not begin like this."""
    before, new = have[-1], list[str]()
    with suppress(Malformed):
        for line in lines[len(have) :] if lines[: len(have)] == have else ():
            _read(before, line)
            new.append(line)
            before = line
    return new


def newest(lines: Sequence[str]) -> tuple[int, int]:
    """Orders what follows in journals that begin alike: by how often somebody took over, then by its length."""
    events = (decode(line.partition(" ")[2].encode("ascii"), EVENTS) for line in lines)
    return sum(isinstance(event, TookOver) for event in events), len(lines)


def replay(limits: Limits, events: Iterable[Event]) -> Membership:
    """Returns the machine in which these events have happened."""
    machine = Membership(limits)
    for event in events:
        machine.apply(event)
    return machine


def _read(before: str, line: str) -> Event:
    check, _, text = line.partition(" ")
    if check != _check(before, text):
        raise Malformed("its checksum is another")
    event: Event = decode(text.encode("ascii", "replace"), EVENTS)
    return event


def _lines(path: Path) -> list[str]:
    """Returns the lines of a journal without a torn last one; bytes that are no text make a line malformed."""
    return path.read_bytes().decode("ascii", "replace").split("\n")[:-1]


def _check(before: str, text: str) -> str:
    return hashlib.sha256(f"{before[:_CHECK]} {text}".encode()).hexdigest()[:_CHECK]


def _unwritable(path: Path, error: OSError) -> LaunchError:
    return LaunchError(f"the journal of the membership {path} cannot be written: {error}. Choose another run.dir")
