"""Which processes of this host live."""

from __future__ import annotations

import os
from pathlib import Path


def process_table() -> str:
    """Identifies the processes that see each other by number: the boot of the machine and the namespace of processes;
    "" where there is no /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def has_ended(pid: int) -> bool:
    """Returns whether the process, of this process's own table, is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
