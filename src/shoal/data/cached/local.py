"""Records in a file of this host, shared by its processes through memory maps.

    records.bin   sealed records, one after the other, each at a multiple of 8 bytes; append-only
    index.bin     int64 [1 + samples]: the end of the records, then for each sample 1 + the start of its record, or 0
    lock          held by the process that appends

Readers take no lock. A record enters the index only after it is written, and an entry of the index is one aligned word,
so readers see a whole record or none. A killed writer leaves at most bytes without an entry, which the next writer
overwrites. After a power cut the index may have reached the disk before the records: a sample with a wrong checksum is
a miss, and is written again.
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
    """Records of samples in a directory of this host. Threads, forked and pickled copies may all read and write.

    directory: where the files are; made if missing.
    samples: number of samples.
    capacity_bytes: size of the records at most. Nothing is evicted, since an epoch reads every sample once, which
        defeats every rule of eviction.

    Raises UserError where the directory cannot be opened.
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
                    if index.tell() < size:  # new, or its maker was killed: zeros are an empty index
                        index.truncate(size)
            self._index: NDArray[np.int64] = np.memmap(directory / "index.bin", np.int64, "r+", shape=(1 + samples,))
        except OSError as error:
            raise UserError(
                f"the sample cache {directory} cannot be opened: {error}. Allow writing there, or give another place "
                "by path"
            ) from error
        self._map: mmap.mmap | bytes = b""

    def __reduce__(self) -> tuple:
        return LocalStore, self._arguments

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):  # the constructor may have failed
            os.close(self._records)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Excludes other processes, threads and forks: the lock belongs to the open file, which each caller opens."""
        lock = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)  # releases the lock

    def get(self, index: int) -> bytes | None:
        """Returns the payload of sample `index`, or None if there is none."""
        start = int(self._index[1 + index]) - 1
        if start < 0:
            return None
        mapped = self._mapped(start + HEADER.size)
        if start + HEADER.size > len(mapped):
            return None  # the file is truncated
        end = start + HEADER.size + HEADER.unpack_from(mapped, start)[1]
        with memoryview(self._mapped(end)) as view:
            return opened(index, view[start:end])

    def _mapped(self, end: int) -> mmap.mmap | bytes:
        """Returns the mapped file, mapped again if the map is shorter than `end` and the file has grown."""
        if end > len(self._map) and os.fstat(self._records).st_size > len(self._map):
            self._map = mmap.mmap(self._records, 0, prot=mmap.PROT_READ)
        return self._map

    def put(self, index: int, payload: bytes) -> None:
        """Appends the payload of sample `index`, unless there is one; warns once if the store cannot take more."""
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
        self._index[0] = end  # before the entry, so that a kill between the two leaves no entry to overwritten bytes
        self._index[1 + index] = 1 + start

    def _stop(self, why: str) -> None:
        self._stopped = True
        warnings.warn(
            f"the sample cache {self._directory} {why}: samples not in it are computed each time", stacklevel=5
        )
