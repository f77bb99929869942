"""The steps of a save, as every rank runs them: begin, write, report, publish. The code blocks; `writer` runs it in a
thread."""

from __future__ import annotations

import errno
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from shoal.checkpoint import dcp, directory
from shoal.checkpoint.manifest import Manifest, write_manifest
from shoal.checkpoint.meeting import Meeting
from shoal.checkpoint.pieces import Piece
from shoal.checkpoint.verify import problems
from shoal.comm.wire import sent
from shoal.errors import CheckpointError

T = TypeVar("T")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class Job:
    """The parameters of a save.

    path: the checkpoint's final path
    step: of the checkpoint
    pieces: of this rank, in host memory
    extra: JSON state; that of rank 0 is saved
    keep: number of checkpoints to keep
    timeout: seconds to wait for another rank
    """

    path: Path
    step: int
    pieces: list[Piece]
    extra: Mapping[str, Any]
    keep: int
    timeout: float


@sent
@dataclass(frozen=True)
class Failure:
    """The reason why a rank could not do its part, as the others are told."""

    rank: int
    cause: str

    @classmethod
    def of(cls, rank: int, error: BaseException, keep: int) -> Failure:
        """Makes the failure from the OSError at the root of `error`, if any: torch turns a full disk into a complaint
        about file positions. `keep`: of the job."""
        root, inner = error, error.__cause__ or error.__context__
        while inner is not None:
            root = inner if isinstance(inner, OSError) else root
            inner = inner.__cause__ or inner.__context__
        remedy = ""
        if getattr(root, "errno", None) in _FULL:  # the newest checkpoint stays until the next one is whole
            remedy = "; free space there, or keep fewer checkpoints" if keep > 1 else "; free space there"
        return cls(rank, f"rank {rank} on {socket.gethostname()}: {type(root).__name__}: {root}{remedy}")


def save_together(job: Job, meeting: Meeting) -> None:
    """Returns, on every rank, when the checkpoint is complete on disk under its name. Raises CheckpointError on every
    rank if it failed on one.

    Rank 0 makes the directory and puts `begin`; each rank writes its file and reports; rank 0 writes index and
    manifest, renames, and puts `done`. A failure is a report too, so all ranks learn the first one.
    """
    tmp, rank = directory.tmp_of(job.path), meeting.rank
    if rank == 0:
        meeting.put("begin", _try(rank, job.keep, lambda: _begin(tmp)))
    begin = meeting.get("begin", job.timeout)
    meeting.put(f"report/{rank}", begin or _try(rank, job.keep, lambda: _write(tmp, rank, job.pieces)))
    if rank == 0:
        meeting.put("done", _conclude(job, meeting))
    failure = meeting.get("done", 2 * job.timeout)  # rank 0 may have waited `timeout` for a silent rank
    meeting.leave(["begin", "done", *(f"report/{r}" for r in range(meeting.size))])
    if failure is not None:
        raise CheckpointError(f"saving the checkpoint of step {job.step} in {job.path.parent} failed: {failure.cause}")


def _try(rank: int, keep: int, action: Callable[[], T]) -> T | Failure:
    """Returns the action's result, or its Failure. Every error is caught: a rank that stays silent would make the
    others wait."""
    try:
        return action()
    except Exception as error:
        return Failure.of(rank, error, keep)


def _begin(tmp: Path) -> None:
    if tmp.exists():
        shutil.rmtree(tmp)
    tmp.mkdir(parents=True)


def _write(tmp: Path, rank: int, pieces: list[Piece]) -> dcp.Written:
    if not tmp.is_dir():
        raise CheckpointError(
            f"{tmp.parent} is not the directory that rank 0 sees; checkpoints need one that all hosts share"
        )
    return dcp.write_pieces(tmp, rank, pieces)


def _conclude(job: Job, meeting: Meeting) -> Failure | None:
    """Waits on rank 0 for all reports, then publishes the checkpoint, or removes the files there are of it."""
    deadline = time.monotonic() + job.timeout
    reports = [_report(meeting, rank, deadline) for rank in range(meeting.size)]
    failures = [report for report in reports if isinstance(report, Failure)]
    failure = failures[0] if failures else _try(0, job.keep, lambda: _publish(job, cast(list[dcp.Written], reports)))
    if failure is not None:
        shutil.rmtree(directory.tmp_of(job.path), ignore_errors=True)
    return failure


def _report(meeting: Meeting, rank: int, deadline: float) -> dcp.Written | Failure:
    try:
        return meeting.get(f"report/{rank}", deadline - time.monotonic())
    except TimeoutError as error:
        return Failure(rank, f"rank {rank} is silent: {error}")


def _publish(job: Job, parts: list[dcp.Written]) -> None:
    tmp = directory.tmp_of(job.path)
    files = dcp.write_index(tmp, parts)
    for rank, part in enumerate(parts):
        for name, record in part.files.items():
            if not (tmp / name).is_file():
                raise CheckpointError(
                    f"rank {rank} wrote {name}, but not where rank 0 looks; all hosts must share {tmp.parent}"
                )
            files[name] = record
    write_manifest(tmp, Manifest(job.step, len(parts), time.time(), files, job.extra))
    directory.publish(job.path)
    retire(job.path.parent, job.step, job.keep)


def retire(parent: Path, step: int, keep: int) -> None:
    """Deletes checkpoints older than `step`, except the `keep - 1` newest sound ones.

    Those of later steps stay (someone went back on purpose, and may want them); damaged ones do not count as kept.
    """
    older = [path for other, path in directory.completed(parent) if other < step]
    sound = [path for path in older if not problems(path, hashes=False)]
    for path in set(older) - set(sound[: keep - 1]):
        directory.remove(path)
