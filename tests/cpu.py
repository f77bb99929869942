"""CPU seconds of each test: of its process, of the ranks and of whatever else it started. Unlike seconds of the clock
they do not depend on what the machine does besides."""

from __future__ import annotations

import os
import time
from contextlib import suppress

TICKS = os.sysconf("SC_CLK_TCK")
_PARENT, _FIRST, _LAST = 1, 11, 15
"""Places in /proc/PID/stat behind the name: the parent, then user and system time of the process and of its children
that have ended."""


def cpu_seconds() -> float:
    """CPU seconds so far of this process and all below it, those that have ended included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{process}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()  # unless it has just ended: its parent counts it then
            parents[process] = int(fields[_PARENT])
            ticks[process] = sum(map(int, fields[_FIRST:_LAST]))
    own = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(ticks[process] for process in own) / TICKS


class Meter:
    """Seconds since the last reading. A reading costs 2 ms, so one that would come within `least` seconds of the last
    is left out: what its test took is part of the next reading."""

    def __init__(self, least: float = 0.5) -> None:
        self.least = least
        self._seconds = cpu_seconds()
        self._time = time.monotonic()

    def read(self, whatever: bool = False) -> float:
        """`whatever`: even if the last reading has only just been."""
        if not whatever and time.monotonic() - self._time < self.least:
            return 0.0
        before, self._seconds, self._time = self._seconds, cpu_seconds(), time.monotonic()
        return self._seconds - before
