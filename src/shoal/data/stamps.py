"""Tells whether files have changed, without reading all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

BLOCK, BLOCKS, MOST_BLOCKS = 1 << 12, 1 << 12, 16
"""Bytes of a block that is looked at; how many blocks of all files, and at most of one."""


def stamps(files: Sequence[Path]) -> list[tuple[str, int, int, str]]:
    """Returns the path, size, time of change and a hash of some blocks of each file: tools can set the time back, and
    two changes may fall into one tick of the file system's clock.

    Of a large file, and of one of many, only samples are read, so that a start takes milliseconds.
    """
    blocks = min(MOST_BLOCKS, BLOCKS // max(1, len(files)))
    found = []
    for file in files:
        stat = file.stat()
        found.append((str(file), stat.st_size, stat.st_mtime_ns, _sample(file, stat.st_size, blocks)))
    return found


def _sample(path: Path, size: int, blocks: int) -> str:
    """Returns a hash of `blocks` blocks of a file, evenly spaced, the first and the last among them; of the whole file
    where it has no more. "" for one that cannot be read, which its reader will say."""
    if not blocks:
        return ""
    found = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            if size <= blocks * BLOCK:
                found.update(file.read(size))
            else:
                for number in range(blocks):
                    file.seek((size - BLOCK) * number // max(1, blocks - 1))
                    found.update(file.read(BLOCK))
    except OSError:
        return ""
    return found.hexdigest()
