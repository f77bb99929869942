"""Files of fixed size on a disk, read and written past the kernel's cache (O_DIRECT) in pieces, by a few threads at
once.

The whole file is there from the beginning, so that a full disk is found before training and not in the middle of a
step.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from glob import iglob
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from shoal.errors import StorageError
from shoal.optim.tiers.generations import Records

SECTOR = 4096
"""Bytes of which O_DIRECT wants addresses, offsets and lengths to be multiples, on any disk."""
PIECE = 4 * 2**20
"""Bytes of one read or write: large enough for any disk's full rate, small enough to share a chunk among threads."""
THREADS = 4


def sectors(nbytes: int) -> int:
    """`nbytes` rounded up to whole sectors."""
    return -(-nbytes // SECTOR) * SECTOR


def buffer(nbytes: int) -> Tensor:
    """Memory (uint8) that begins on a page, for direct reads and writes."""
    return torch.frombuffer(mmap.mmap(-1, max(SECTOR, sectors(nbytes))), dtype=torch.uint8)


class Stored:
    """A file of `size` bytes, a multiple of SECTOR. Futures end when the bytes are there; StorageError says what went
    wrong where."""

    def __init__(self, path: Path, size: int, pool: ThreadPoolExecutor) -> None:
        self.path, self.size, self._pool = path, size, pool
        self.direct = True
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = False  # a file system without it, such as older tmpfs
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def allocate(self) -> None:
        """Takes the file's room on the disk; OSError if there is not enough."""
        os.posix_fallocate(self._fd, 0, self.size)
        os.ftruncate(self._fd, self.size)

    def read(self, into: Tensor) -> list[Future[None]]:
        """Brings the file's first `into.nbytes` bytes (whole sectors) into `into`, from `buffer`."""
        return self._pieces(self._read, into)

    def write(self, data: Tensor) -> list[Future[None]]:
        """Writes `data`, from `buffer`, to the beginning of the file."""
        return self._pieces(self._write, data)

    def sync(self) -> None:
        """Returns when what was written survives a loss of power."""
        os.fdatasync(self._fd)

    def mapped(self) -> Tensor:
        """Maps the file as memory (uint8), read when it is looked at; changes stay private."""
        return torch.from_file(str(self.path), shared=False, size=self.size, dtype=torch.uint8)

    def close(self) -> None:
        os.close(self._fd)

    def _pieces(self, work: Callable[[memoryview, int], None], data: Tensor) -> list[Future[None]]:
        assert data.nbytes <= self.size and data.nbytes % SECTOR == 0
        view = memoryview(data.numpy().data)
        return [self._pool.submit(work, view[start : start + PIECE], start) for start in range(0, data.nbytes, PIECE)]

    def _read(self, view: memoryview, start: int) -> None:
        done = 0
        while done < len(view):
            got = self._call("reading", os.preadv, view[done:], start + done)
            if got == 0:
                raise StorageError(
                    f"{self.path} ends at byte {start + done:,}, of {self.size:,}: something has cut it. "
                    "Training can go on from the last checkpoint, with this file deleted"
                )
            done += got
        self._forget(start, len(view))

    def _write(self, view: memoryview, start: int) -> None:
        done = 0
        while done < len(view):
            done += self._call("writing", os.pwritev, view[done:], start + done)
        self._forget(start, len(view))

    def _call(self, what: str, call: Callable[[int, list[memoryview], int], int], view: memoryview, offset: int) -> int:
        try:
            return call(self._fd, [view], offset)
        except OSError as error:
            where = f"{len(view):,} bytes at byte {offset:,} of {self.path}"
            raise StorageError(f"{what} {where}: {error.strerror}") from error

    def _forget(self, start: int, size: int) -> None:
        if not self.direct:
            os.posix_fadvise(self._fd, start, size, os.POSIX_FADV_DONTNEED)


def room_for_pages(path: Path) -> int:
    """Bytes that pages in the directory `path` may take: those that are free on its disk, and those of an earlier
    run's there, which new ones replace, whatever else lies in it."""
    there, room = next(each for each in (path, *path.absolute().parents) if each.is_dir()), 0
    for each in iglob("rank-*/*", root_dir=path):
        with suppress(FileNotFoundError):  # its run has just ended
            room += 512 * (path / each).stat().st_blocks
    return shutil.disk_usage(there).free + room


class Disk:
    """Files of one rank in `directory`, which is its own while it runs: at most `capacity` bytes (None: what the disk
    has).

    Raises StorageError where another process uses the directory, or it cannot be written.
    """

    def __init__(self, directory: Path, capacity: int | None = None) -> None:
        self.directory, self.capacity, self.used = directory, capacity, 0
        self._files: list[Stored] = []
        self._replaced = False
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="shoal-disk")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _sweep(_beside(directory))
            self._lock = FileLock(directory / "lock")
            self._lock.acquire(timeout=0)
        except Timeout:
            raise StorageError(
                f"plan.memory.disk.path: {directory} is in use by another run. Give each run a path of its own"
            ) from None
        except OSError as error:
            raise StorageError(f"plan.memory.disk.path: {directory} cannot be written: {error.strerror}") from error

    def buffer(self, nbytes: int) -> Tensor:
        """Allocates memory for a page in its turn."""
        return buffer(nbytes)

    def first(self, nbytes: int) -> Tensor:
        """Allocates memory for what a page begins with."""
        return buffer(nbytes)

    @property
    def records(self) -> Records:
        """What says which generation of its files is whole."""
        return Records(self.directory)

    def files(self, sizes: Mapping[str, int]) -> Mapping[str, Stored]:
        """Makes files of `sizes` by name, with their room on the disk; StorageError, saying what is missing, if there
        is none."""
        wanted = within(self.capacity, sizes)
        made = dict[str, Stored]()
        _allow_open_files(len(sizes))
        for old in self._old():
            if old.name not in sizes:
                old.unlink()
        try:
            for name, size in sizes.items():
                made[name] = Stored(self.directory / name, size, self._pool)
                self._files.append(made[name])
                made[name].allocate()
        except OSError as error:
            free = os.statvfs(self.directory)
            raise StorageError(
                f"{self.directory}: {error.strerror}: {wanted:,} bytes are needed there, "
                f"{free.f_bavail * free.f_frsize:,} are free. "
                "Give plan.memory.disk another path, or more of plan.memory.host"
            ) from error
        self.used = wanted
        return made

    def keeps_all(self, sizes: Mapping[str, int]) -> bool:
        """Returns whether `files` would leave what the files hold that are here already."""
        return all(old.stat().st_size <= sizes.get(old.name, 0) for old in self._old())

    def _old(self) -> Iterator[Path]:
        return self.directory.glob("[0-9]*.[ab]")

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leaves the directory's name to another Disk of this process, inside the context: files and lock go to a
        directory beside it. Afterwards that one's stay if there are such, else these come back."""
        name, there = self.directory, _beside(self.directory)
        name.rename(there)
        self.directory = there
        try:
            yield
        except BaseException:
            shutil.rmtree(name, ignore_errors=True)
            raise
        finally:
            self._replaced = name.exists()
            if not self._replaced:
                self.directory = there.rename(name)

    def close(self) -> None:
        """Ends the threads and lets others use the directory; the files stay, unless another Disk has replaced this
        one."""
        self._pool.shutdown()
        for each in self._files:
            each.close()
        self._files.clear()
        self._lock.release()
        if self._replaced:
            shutil.rmtree(self.directory)


def within(capacity: int | None, sizes: Mapping[str, int]) -> int:
    """Counts the bytes of files of `sizes`. Raises StorageError where they are more than a rank may take."""
    wanted = sum(sizes.values())
    if capacity is not None and wanted > capacity:
        raise StorageError(
            f"plan.memory.disk.size = {capacity:,} bytes for a rank: {wanted:,} are needed. "
            "Give more, or more of plan.memory.host"
        )
    return wanted


def directory_of(path: Path, rank: int) -> Path:
    """Returns where a rank's files lie on the disk of a run."""
    return path / f"rank-{rank}"


def _beside(directory: Path) -> Path:
    """Returns where the files of a Disk lie while another one takes its directory."""
    return directory.with_name(f"{directory.name}.aside")


def _sweep(directory: Path) -> None:
    """Deletes what a process that was killed has left aside; what is in use stays."""
    if directory.exists():
        with suppress(Timeout), FileLock(directory / "lock").acquire(timeout=0):
            shutil.rmtree(directory)


def _allow_open_files(number: int) -> None:
    """Raises the process's limit of open files, as far as it may, where `number` more would exceed it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + len(os.listdir("/proc/self/fd")) + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def wait(work: Sequence[Future[None]]) -> None:
    """Returns when all of it is done, then raises the first error."""
    errors = [each.exception() for each in work]
    for error in errors:
        if error is not None:
            raise error
