"""The journal of a part: what clients have pushed since the last checkpoint, written before it is acknowledged.

    length of the JSON (4 bytes), CRC-32 of JSON and raw (4 bytes), JSON, raw tensors

The JSON says how many bytes each raw tensor has. What a killed server wrote is in the kernel's memory and survives it;
`durable` also waits for the disk, so that it survives the host. A torn last entry was never acknowledged: it is
dropped.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.device import to_host
from shoal.errors import StorageError
from shoal.server.sessions.carriers import bytes_of

_HEAD = struct.Struct("!II")


def has_pushes(path: Path) -> bool:
    """Returns whether there is a journal with gradients."""
    if not path.exists():
        return False
    journal = Journal(path, False)
    found = any(raw for _, raw in journal.entries())
    journal.close()
    return found


def on_host(raw: Sequence[Tensor]) -> list[Tensor]:
    """Returns raw tensors as they go into a journal, in the host's memory: they are there when it returns."""
    here, events = to_host(*raw)
    for event in events:
        event.synchronize()
    return here


class Journal:
    """Appends to the file `path`, which is made if it is missing. Raises StorageError where it cannot be written.

    has_pushes: whether there are entries with raw tensors, as far as they were read or written here.
    """

    def __init__(self, path: Path, durable: bool) -> None:
        self.path, self._durable, self.has_pushes = path, durable, False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._end = os.lseek(self._file, 0, os.SEEK_END)
        except OSError as error:
            raise self._unwritable(error) from error

    @property
    def nbytes(self) -> int:
        """Bytes that it has."""
        return self._end

    def entries(self) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        """Gives what was written, each with its raw tensors (uint8), up to a torn end, which is cut off."""
        at, end = 0, self._end
        while (entry := self._read(at, end)) is not None:
            at, about, raw = entry
            self.has_pushes = self.has_pushes or bool(raw)
            yield about, raw
        self._cut(at)

    def append(self, about: dict[str, Any], raw: Sequence[Tensor] = ()) -> None:
        """Writes an entry; all of it or nothing. `raw`: on the CPU (see `on_host`)."""
        views = [bytes_of(each) for each in raw]
        text = json.dumps({**about, "raw": [len(view) for view in views]}).encode()
        check = zlib.crc32(text)
        for view in views:
            check = zlib.crc32(view, check)
        try:
            for data in (memoryview(_HEAD.pack(len(text), check) + text), *views):
                while data:
                    data = data[os.write(self._file, data) :]
            if self._durable:
                os.fdatasync(self._file)
        except OSError as error:
            self._cut(self._end)
            raise self._unwritable(error) from error
        self._end += _HEAD.size + len(text) + sum(map(len, views))
        self.has_pushes = self.has_pushes or bool(views)

    def close(self) -> None:
        os.close(self._file)

    def _read(self, at: int, end: int) -> tuple[int, dict[str, Any], list[Tensor]] | None:
        """Returns the end of the entry at `at`, its JSON and its raw tensors; None where no whole one is there."""
        head = os.pread(self._file, _HEAD.size, at)
        if len(head) < _HEAD.size:
            return None
        length, check = _HEAD.unpack(head)
        at += _HEAD.size
        text = os.pread(self._file, min(length, end - at), at)
        if len(text) < length:
            return None
        at += length
        try:
            about = json.loads(text)
            sizes = about.pop("raw")
        except (ValueError, KeyError, AttributeError):
            return None
        if at + sum(sizes) > end:
            return None
        found, raw = zlib.crc32(text), []
        for size in sizes:
            tensor = torch.empty(size, dtype=torch.uint8)
            view, done = bytes_of(tensor), 0
            while done < size:
                done += os.preadv(self._file, [view[done:]], at + done)
            found, at = zlib.crc32(view, found), at + size
            raw.append(tensor)
        return (at, about, raw) if found == check else None

    def _cut(self, size: int) -> None:
        os.ftruncate(self._file, size)
        self._end = os.lseek(self._file, size, os.SEEK_SET)

    def _unwritable(self, error: OSError) -> StorageError:
        return StorageError(f"the journal {self.path} cannot be written: {error}. Free space there, or choose another")
