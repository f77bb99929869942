"""One run in a run directory at a time: `run.lock` says which process has it, and since when.

The file is made by O_EXCL, which also excludes other hosts on a shared file system. The lock of a process that has
ended is stale and is taken over; process id and start time tell that on this host. A lock of another host is never
taken over, because nothing is known of that host's processes.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from filelock import FileLock

from shoal.elastic.control import JOB
from shoal.errors import UserError
from shoal.replace import replace_text

if TYPE_CHECKING:  # commands that only read a run import no torch
    from shoal.comm import Group

log = logging.getLogger(__name__)

NAME = "run.lock"
_GUARD = "run.lock.guard"
PATIENCE = 3.0
"""Seconds to wait for a holder on this host to end, as a killed process takes a moment to go."""
_SAME_START = 2.0  # seconds: the start time of a process is rounded, and follows the clock


@dataclass(frozen=True)
class Holder:
    """A process that has a run directory. `started`: Unix time at which it began; `taken`: that at which it took the
    directory, in nanoseconds, since a process may have it more than once; `job`: the id of a job whose nodes come and
    go. Its generations never run at once, so a later one takes the directory over. `replans`: whether it looks for
    requests to change its plan."""

    host: str
    pid: int
    started: float
    taken: int = 0
    job: str = ""
    replans: bool = True

    @classmethod
    def here(cls) -> Holder:
        return cls(socket.gethostname(), os.getpid(), psutil.Process().create_time(), job=_job())

    @property
    def has_ended(self) -> bool:
        """True if its process is known to have ended; never for a process of another host, unless that was of this
        job."""
        if self.job and self.job == _job():
            return True
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            return process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - self.started) > _SAME_START
        except psutil.NoSuchProcess:
            return True


@contextmanager
def locked(
    run_dir: Path, group: Group, keeps: type[Exception] | tuple[()] = (), replans: bool = True
) -> Iterator[None]:
    """Holds the lock of the run directory. A collective of `group`, whose rank 0 takes the lock.

    keeps: an exception after which the lock stays, because the job goes on. replans: see Holder.

    Raises UserError on all ranks where another run has it or it cannot be written.
    """
    problem: UserError | None = None
    new = not os.path.exists(run_dir)
    if group.rank == 0:
        try:
            _take(run_dir, replans)
        except UserError as error:
            problem = error
        except OSError as error:
            problem = UserError(f"the run directory {run_dir} cannot be written: {error}. Choose another run.dir")
    problem = group.broadcast_object(problem)
    if problem is not None:
        raise problem
    goes_on = False
    try:
        yield
    except keeps:
        goes_on = True
        raise
    finally:
        if group.rank == 0 and not goes_on:
            _give_back(run_dir, new)


def refuse_if_taken(run_dir: Path) -> None:
    """Raises UserError where another run has the directory. Asked before ranks are started, whose logs go there."""
    deadline = time.monotonic() + PATIENCE
    while (holder := _holder(run_dir / NAME)) is not None and not holder.has_ended:
        if holder.host != socket.gethostname() or time.monotonic() > deadline:
            raise _taken(run_dir, holder)
        time.sleep(0.1)


def own_hold(run_dir: Path) -> Holder | None:
    """Returns how this process, which has the directory, holds it."""
    holder = _holder(run_dir / NAME)
    if holder is None:
        return None
    return holder if replace(Holder.here(), taken=holder.taken, replans=holder.replans) == holder else None


def holder_of(run_dir: Path) -> Holder | None:
    """Returns the process that has the directory, as far as this host knows; None where no run has it."""
    return holders(run_dir)[0]


def holders(run_dir: Path) -> tuple[Holder | None, Holder | None]:
    """Returns the process that has the directory, as `holder_of`; and the one that had it last, where it has ended and
    was of a job whose nodes come and go: another one may be about to take it."""
    last = _holder(run_dir / NAME)
    if last is None or not last.has_ended:
        return last, None
    return None, last if last.job else None


def _take(run_dir: Path, replans: bool) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / NAME
    with FileLock(run_dir / _GUARD):  # two processes of this host might both find a stale lock
        refuse_if_taken(run_dir)
        mine = json.dumps(asdict(replace(Holder.here(), taken=time.time_ns(), replans=replans)))
        before = _holder(path)
        if before is not None and before.job and before.job == _job():
            try:
                replace_text(path, mine)  # who looks finds the one or the other
            except OSError as error:  # a full disk: what trains goes on without it
                log.warning("%s stays that of the generation before: it cannot be written (%s)", path, error)
            return
        with suppress(FileNotFoundError):
            path.unlink()
        try:
            with path.open("x") as file:
                file.write(mine)
        except FileExistsError:  # another host was quicker
            raise _taken(run_dir, _holder(path)) from None


def _give_back(run_dir: Path, new: bool) -> None:
    """Removes the lock, and a `new` directory in which nothing else was made."""
    path = run_dir / NAME
    if own_hold(run_dir) is not None:
        with suppress(OSError):  # a lock that stays is stale once this process has ended
            path.unlink()
            if new and [each.name for each in run_dir.iterdir()] in ([], [_GUARD]):
                (run_dir / _GUARD).unlink(missing_ok=True)
                run_dir.rmdir()


def _job() -> str:
    return os.environ.get(JOB, "")


def _holder(path: Path) -> Holder | None:
    """Returns who has the lock; None where nobody has, or where its writer ended before the file was complete. Raises
    UserError where that cannot be read."""
    try:
        return Holder(**json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None
    except OSError as error:
        raise UserError(f"the run directory {path.parent} cannot be read: {error}. Choose another run.dir") from error


def _taken(run_dir: Path, holder: Holder | None) -> UserError:
    if holder is None:
        return UserError(f"{run_dir} has just been taken by another run: give another run.dir")
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.started))
    remedy = (
        "wait for it, end it, or give another run.dir"
        if holder.host == socket.gethostname()
        else f"if that process has ended, delete {run_dir / NAME}; else wait for it, or give another run.dir"
    )
    return UserError(
        f"{run_dir} is in use by process {holder.pid} on host {holder.host}, which started at {since}: {remedy}"
    )
