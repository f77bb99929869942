"""Records in a file of this host, shared by its processes through memory maps.

    records.bin   sealed records, one after the other, each at a multiple of 8 bytes; only ever appended to
    index.bin     int64 [1 + samples]: where records end, then for each sample 1 + where its record starts, or 0
    lock          held by the one process that appends

Readers take no lock. A record is referred to only when it is written, and a place in the index is one aligned word, so they see a whole
record or none. A writer that is killed leaves at most bytes that nothing refers to; the next one writes over them. After a power cut
the index may have reached the disk before the records: a checksum that does not fit makes the sample a miss, and it is written anew.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import UserError
from .record import HEADER, opened, seal


class LocalStore:
    """The records of `samples` samples under `directory`, which is made; at most `capacity_bytes` of them.

    Nothing is evicted: an epoch reads every sample once, so the one to be read next is never the one read last. Threads, forked and
    pickled copies may all read and write.
    """

    def __init__(self, directory: Path, samples: int, capacity_bytes: int) -> None:
        self._arguments = (directory, samples, capacity_bytes)
        self._directory, self._capacity = directory, capacity_bytes
        self._stopped = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._records = os.open(directory / "records.bin", os.O_RDWR | os.O_CREAT, 0o600)
                size = 8 * (1 + samples)
                with open(directory / "index.bin", "ab") as index:
                    if index.tell() < size:  # a new file, or one whose maker was killed: zeros are an empty index
                        index.truncate(size)
            self._index: NDArray[np.int64] = np.memmap(directory / "index.bin", np.int64, "r+", shape=(1 + samples,))
        except OSError as error:
            raise UserError(
                f"the sample cache {directory} cannot be opened: {error}. Allow writing there, or give another place by path"
            ) from error
        self._map: mmap.mmap | bytes = b""

    def __reduce__(self) -> tuple:
        return LocalStore, self._arguments

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):  # the constructor may have failed
            os.close(self._records)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps out other processes, threads and forks: a lock belongs to the open file, so each takes one of its own."""
        lock = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)  # which releases it

    def get(self, index: int) -> bytes | None:
        """The payload of sample `index`, or None if it is not here."""
        start = int(self._index[1 + index]) - 1
        if start < 0:
            return None
        mapped = self._mapped(start + HEADER.size)
        if start + HEADER.size > len(mapped):
            return None  # a file cut short
        end = start + HEADER.size + HEADER.unpack_from(mapped, start)[1]
        with memoryview(self._mapped(end)) as view:
            return opened(index, view[start:end])

    def _mapped(self, end: int) -> mmap.mmap | bytes:
        """The file as mapped, mapped anew if it has grown beyond `end` since."""
        if end > len(self._map) and os.fstat(self._records).st_size > len(self._map):
            self._map = mmap.mmap(self._records, 0, prot=mmap.PROT_READ)
        return self._map

    def put(self, index: int, payload: bytes) -> None:
        """Appends the payload of sample `index`, unless it is here; a store that is full or not writable warns of it once."""
        if self._stopped:
            return
        record = seal(index, payload)
        try:
            with self._locked():
                if self.get(index) is None:  # else another process was first
                    self._append(index, record)
        except OSError as error:
            self._stop(f"cannot be written: {error}")

    def _append(self, index: int, record: bytes) -> None:
        start = int(self._index[0])
        end = start + -(-len(record) // 8) * 8
        if end > self._capacity:
            self._stop(f"is full at {start} of {self._capacity} bytes")
            return
        if os.pwrite(self._records, record, start) < len(record):
            self._stop("has no space left on its disk")
            return
        self._index[0] = end  # before the reference: if killed between the two, nobody writes over what is referred to
        self._index[1 + index] = 1 + start

    def _stop(self, why: str) -> None:
        self._stopped = True
        warnings.warn(f"the sample cache {self._directory} {why}: samples not in it are computed each time", stacklevel=5)
