"""The report of a failed rank to its launcher: one JSON file, which the launcher turns into its message."""

from __future__ import annotations

import json
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from shoal.device import is_own_failure
from shoal.errors import CorruptionError, LaunchError, ShoalError

_PACKAGES = Path(__file__).parents[2]
_SHOAL = str(_PACKAGES / "shoal")
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "NCCL communicator was aborted",
    "wait timeout after",  # the store's: another rank never set the key that this one waited for
)
_LOST_DEVICE = (
    "This process can use its GPU no more. Where the GPU itself was lost, `dmesg` (Xid) and `nvidia-smi` say so: leave "
    "it, or its host, out and go on from the last checkpoint. Where a kernel failed (an index out of range), "
    "CUDA_LAUNCH_BLOCKING=1 shows which operation it was"
)


@dataclass(frozen=True)
class Failure:
    """Why a rank failed.

    seconds: Unix time of the failure, to order the ranks.
    traceback: empty where `message` says all.
    lost_peer: a collective or the store failed because another rank was gone, or another rank holds wrong bits; this
        rank is not at fault.
    """

    rank: int
    host: str
    seconds: float
    message: str
    traceback: str
    exit_code: int
    lost_peer: bool


def failure_of(error: BaseException, rank: int) -> Failure:
    """Returns the Failure for `error`, raised by `rank`. The message includes notes (`error.add_note`)."""
    if isinstance(error, ShoalError):
        message, text, exit_code = "\n".join([str(error), *getattr(error, "__notes__", [])]), "", error.exit_code
    else:
        message = "".join(traceback.TracebackException(type(error), error, None).format_exception_only()).strip()
        text, exit_code = folded_traceback(error), 1
        if is_own_failure(error):
            message += f"\n{_LOST_DEVICE}"
    return Failure(rank, socket.gethostname(), time.time(), message, text, exit_code, has_lost_peer(error))


def has_lost_peer(error: BaseException) -> bool:
    """Returns whether a rank raised `error` because another one was gone, or holds wrong bits."""
    return (
        isinstance(error, LaunchError)
        or (isinstance(error, CorruptionError) and not error.here)
        or (isinstance(error, RuntimeError | OSError) and any(s in str(error) for s in _LOST_PEER))
    )


def write_failure(failure: Failure, path: Path) -> None:
    """Writes `failure` to `path` atomically, so that the launcher never reads half of it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(failure)))
    temporary.rename(path)


def read_failure(path: Path) -> Failure | None:
    """Reads the Failure at `path`; None if the rank wrote none."""
    return Failure(**json.loads(path.read_text())) if path.exists() else None


def write_end(path: Path) -> None:
    """Leaves beside `path` that a rank's program has ended without an error, from when on others miss it. Its process
    may take seconds more on a busy machine."""
    with suppress(OSError):  # then the end of the process has to do
        _end_beside(path).touch()


def read_end(path: Path) -> float | None:
    """Returns the Unix time at which `write_end` was called; None if it was not."""
    end = _end_beside(path)
    return end.stat().st_mtime if end.exists() else None


def _end_beside(path: Path) -> Path:
    return path.with_suffix(".ended")


def folded_traceback(error: BaseException) -> str:
    """Returns the traceback of `error`, with successive frames of Shoal or torch folded to one line.

    Nothing is folded where the last frame that is not torch's is Shoal's.
    """
    summary = traceback.TracebackException.from_exception(error)
    if not _broke_in_shoal(summary):
        _fold(summary)
    return "".join(summary.format())


class _Folded(traceback.StackSummary):
    """A stack that prints a folded frame as its name alone ("3 frames in torch")."""

    def format_frame_summary(self, frame: traceback.FrameSummary) -> str:
        return super().format_frame_summary(frame) if frame.lineno else f"  ... {frame.name}\n"


def _fold(summary: traceback.TracebackException) -> None:
    folded = _Folded()  # not `from_list`, which makes a plain StackSummary
    folded.extend(_fold_frames(summary.stack))
    summary.stack = folded
    for other in (summary.__cause__, summary.__context__, *(summary.exceptions or ())):
        if other is not None:
            _fold(other)


def _fold_frames(stack: traceback.StackSummary) -> Iterator[traceback.FrameSummary]:
    started = False
    for owner, run in groupby(stack, key=lambda frame: _owner(frame.filename)):
        frames = list(run)
        if owner in ("shoal", "torch") and started:
            count = f"{len(frames)} frame{'s' if len(frames) > 1 else ''} in {owner}"
            yield traceback.FrameSummary(frames[0].filename, None, count, line="")
        elif owner == "user":
            started = True  # the frames before it only started the script
            yield from frames


def _broke_in_shoal(summary: traceback.TracebackException) -> bool:
    owners = [owner for frame in summary.stack if (owner := _owner(frame.filename)) in ("shoal", "user")]
    return not owners or owners[-1] == "shoal"


def _owner(filename: str) -> str:
    """Returns whose code a frame is: "shoal", "torch", "start" (how Python runs a script) or "user"."""
    if filename.startswith(_SHOAL + "/"):
        return "shoal"
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__ is not None and filename.startswith(str(Path(torch.__file__).parent) + "/"):
        return "torch"
    return "start" if filename in ("<frozen runpy>", "<frozen importlib._bootstrap>") else "user"


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text, or its class where it has none."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
