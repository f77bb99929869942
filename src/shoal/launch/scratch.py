"""Temporary folders that go with their process; what killed ones have left is swept when the next folder is made.

A folder's name says whose it is: shoal-KIND-NAMESPACE-PID-START-RANDOM, with the namespace of processes in which the id means something
(containers may share a temporary directory) and the clock tick at which the process started (ids come again).
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME = re.compile(r"shoal-(?:run|doctor)-(\d+)-(\d+)-(\d+)-\w+")


@contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """A new folder that only this user can enter, gone at the end; first, those of dead processes go. `kind`: "run" or "doctor"."""
    sweep()
    own = f"shoal-{kind}-{_namespace()}-{os.getpid()}-{_started(os.getpid()) or 0}-"
    with tempfile.TemporaryDirectory(prefix=own) as folder:
        yield Path(folder)


def sweep() -> list[Path]:
    """Removes this user's folders whose process is no more; returns them. Whatever else has such a name is left alone."""
    swept: list[Path] = []
    if _started(os.getpid()) is None:  # nothing tells here who lives
        return swept
    for path in Path(tempfile.gettempdir()).glob("shoal-*"):
        if (found := _NAME.fullmatch(path.name)) is None or found[1] != str(_namespace()):
            continue
        try:
            state = path.lstat()
        except FileNotFoundError:  # its owner, or another sweep, was first
            continue
        if stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and _started(int(found[2])) != int(found[3]):
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    return swept


def _namespace() -> int:
    """0 where there is none to be seen, which is then all that is swept."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _started(pid: int) -> int | None:
    """The tick since the boot at which the process started; None if there is none, as everywhere but on Linux."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
