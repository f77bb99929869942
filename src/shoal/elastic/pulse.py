"""What shows ranks that their supervisor runs: a file in which it writes the time again and again. A rank that has seen
no beat for SILENCE seconds ends itself: a supervisor that is stopped (SIGSTOP, a debugger) can end nobody, and others
may have gone on without its node.

They do so without its consent after more than that only where it trained alone (a lease in etcd lasts 4 s); else its
ranks can commit nothing without the others. A thread of its own beats, which nothing else in the supervisor delays.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import threading
import time
from pathlib import Path

VARIABLE = "SHOAL_PULSE"
"""Names the file."""
BEAT, SILENCE = 0.25, 2.0
"""Seconds between two beats, and between two looks at them; seconds without one after which a rank ends."""
_TIME = struct.Struct("!d")


class Pulse:
    """Beats in the file `path`, until it is closed. Times are those of CLOCK_MONOTONIC, the same for all processes of a
    host."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._closed = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._live, name="shoal-pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Beats no more."""
        self._closed.set()
        self._thread.join()
        os.close(self._file)

    def _live(self) -> None:
        while not self._closed.wait(BEAT):
            self._beat()

    def _beat(self) -> None:
        os.pwrite(self._file, _TIME.pack(time.monotonic()), 0)


def end_without(path: Path) -> None:
    """Ends this process, with those that it has started, once nobody beats in the file `path`."""
    threading.Thread(target=_watch, args=(path,), name="shoal-pulse", daemon=True).start()


def _watch(path: Path) -> None:
    late = 0  # looks in a row, since this process, or the whole host, may have stood still before one
    while late < 2:
        time.sleep(BEAT)
        late = late + 1 if time.monotonic() - _last(path) > SILENCE else 0
    print(
        f"shoal: process {os.getpid()} ends: its supervisor has been silent for {SILENCE:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    if os.getpgid(0) == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _last(path: Path) -> float:
    """Returns when somebody has beaten last; 0 where there is no such file."""
    try:
        return float(_TIME.unpack(path.read_bytes())[0])
    except (OSError, struct.error):
        return 0.0
