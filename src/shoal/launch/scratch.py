"""Temporary folders that are removed with their process. Folders of killed processes go when the next folder is made.

A folder's name identifies its process: shoal-KIND-NAMESPACE-PID-START-RANDOM, with the PID namespace (containers may
share a temporary directory) and the clock tick at which the process started (process ids are used again).
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

KINDS = ("run", "served", "doctor", "measure")
_NAME = re.compile(rf"shoal-(?:{'|'.join(KINDS)})-(\d+)-(\d+)-(\d+)-\w+")


@contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """Makes a folder that only this user can enter and removes it at the end, after sweeping those of dead processes.

    kind: one of KINDS, by which it is known.
    """
    assert kind in KINDS
    sweep()
    own = f"shoal-{kind}-{_namespace()}-{os.getpid()}-{_started(os.getpid()) or 0}-"
    with tempfile.TemporaryDirectory(prefix=own) as folder:
        yield Path(folder)


def sweep(where: Path | None = None) -> list[Path]:
    """Removes this user's folders whose process has ended and returns them; leaves everything else with such a name.

    where: by default the system's folder for temporary files.
    """
    swept: list[Path] = []
    if _started(os.getpid()) is None:  # this system does not tell which processes live
        return swept
    for path in (where or Path(tempfile.gettempdir())).glob("shoal-*"):
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
    """Returns the PID namespace of this process, 0 where the system does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _started(pid: int) -> int | None:
    """Returns the clock tick since boot at which the process started; None without such a process, or without Linux."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
