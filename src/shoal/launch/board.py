"""What a rank shows of its progress to its supervisor: a small file, written in place.

    step        the last committed step, -1 before the first
    phase       what it is at (see below)
    first       seconds in which the first of a kind is to be done that nobody has timed yet: the first step of a
                generation, microbatch of an evaluation, save; 0 where they may take any time
    evaluation, save, sample    the longest seconds between two signs in an evaluation, and from a save or a sample to
                the next step, since the last first step; 0 where there was none. The rank measures them, since they may
                be over before anybody looks at the board again
    stepped     when it has last come further: with a step, a microbatch of an evaluation, another phase
    alive       when a thread of the rank last ran; it does not while the process is stopped
    part, pace, best    which part of the model it computes; seconds a sample of its own work, of late and at best, 0
                where they are not known
    waits       since when it has been in the collective `where`, 0 where it is in none

Times are those of CLOCK_MONOTONIC, which is the same for all processes of a host.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "SHOAL_BOARD"
"""Names the file; without it a rank shows nothing."""

BUSY, STEP, EVALUATION, SAVE, FIRST, SAMPLE = range(6)
"""Phases: something that takes nobody knows how long, such as building the model; between two steps; in an evaluation;
from the beginning of a save to the next step; in the first step, of a generation or under a plan; from the beginning of
a sample that the model writes to the next step."""

_FIELDS = struct.Struct("!qBdddddd")
_PACE = struct.Struct("!qdd")
_WAITING = struct.Struct("!dH")
_TEXT = 200
_SECONDS = 0.25


@dataclass(frozen=True)
class Progress:
    """What a board shows (see above)."""

    step: int = -1
    phase: int = BUSY
    stepped: float = 0.0
    alive: float = 0.0
    waits: float = 0.0
    where: str = ""
    part: int = 0
    pace: float = 0.0
    best: float = 0.0
    first: float = 0.0
    evaluation: float = 0.0
    save: float = 0.0
    sample: float = 0.0

    @property
    def training(self) -> bool:
        return self.phase == STEP


class Board:
    """The board of this rank. `waiting`: returns since when the rank has been in which collective, or None.
    `first`: as above."""

    def __init__(self, path: Path, waiting: Callable[[], tuple[float, str] | None], first: float = 0.0) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._waiting, self._first, self._step = waiting, first, -1
        self._phase, self._shown = BUSY, 0.0
        self._longest = {EVALUATION: 0.0, SAVE: 0.0, SAMPLE: 0.0}
        self.show(BUSY)
        self.pace(0, 0.0, 0.0)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._live, name="shoal-board", daemon=True)
        self._thread.start()

    def show(self, phase: int, step: int | None = None, timed: bool = True) -> None:
        """Shows that this rank has come further: a committed step, or something of another phase. `timed`: False where
        it may take longer than what was measured of that phase says."""
        self._step = self._step if step is None else step
        now = time.monotonic()
        if phase == FIRST:
            self._longest = dict.fromkeys(self._longest, 0.0)
        elif self._phase in self._longest:
            self._longest[self._phase] = max(self._longest[self._phase], now - self._shown)
        self._phase, self._shown = phase, now
        longest = (seconds if timed or each != phase else 0.0 for each, seconds in self._longest.items())
        os.pwrite(self._file, _FIELDS.pack(self._step, phase, self._first, *longest, now, now), 0)

    def pace(self, part: int, now: float, best: float) -> None:
        """Shows how long this rank's own work takes."""
        os.pwrite(self._file, _PACE.pack(part, now, best), _FIELDS.size)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._show_wait(0.0, "")
        os.close(self._file)

    def _live(self) -> None:
        while not self._closed.wait(_SECONDS):
            os.pwrite(self._file, struct.pack("!d", time.monotonic()), _FIELDS.size - 8)
            self._show_wait(*self._waiting() or (0.0, ""))

    def _show_wait(self, since: float, where: str) -> None:
        text = where.encode()[:_TEXT]
        os.pwrite(self._file, _WAITING.pack(since, len(text)) + text, _FIELDS.size + _PACE.size)


def open_board(
    environ: Mapping[str, str], waiting: Callable[[], tuple[float, str] | None], first: float = 0.0
) -> Board | None:
    """Returns this rank's board; None where no supervisor wants one. See Board."""
    return Board(Path(environ[VARIABLE]), waiting, first) if VARIABLE in environ else None


def read_board(path: Path) -> Progress:
    """Reads a board; the default where the rank has not shown anything yet."""
    data = b""
    with suppress(OSError):
        data = path.read_bytes()
    if len(data) < _FIELDS.size:
        return Progress()
    data = data.ljust(_FIELDS.size + _PACE.size + _WAITING.size, b"\0")
    part, pace, best = _PACE.unpack_from(data, _FIELDS.size)
    waits, size = _WAITING.unpack_from(data, _FIELDS.size + _PACE.size)
    text = data[_FIELDS.size + _PACE.size + _WAITING.size :][:size].decode(errors="replace")
    step, phase, first, *longest, stepped, alive = _FIELDS.unpack_from(data)
    return Progress(step, phase, stepped, alive, waits, text, part, pace, best, first, *longest)
