"""What a failed rank leaves for its launcher: one JSON file, from which the launcher tells the person what happened."""

from __future__ import annotations

import json
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from shoal.errors import LaunchError, ShoalError

_PACKAGES = Path(__file__).parents[2]
_SHOAL = str(_PACKAGES / "shoal")
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "NCCL communicator was aborted",
    "wait timeout after",  # of the store: what the other rank was to leave there never came
)


@dataclass(frozen=True)
class Failure:
    """Why a rank failed. `traceback` is empty where `message` is the whole story; `seconds` is the time of day, to order the ranks.

    `lost_peer`: the rank itself did nothing wrong, a collective or the store failed because another rank had gone.
    """

    rank: int
    host: str
    seconds: float
    message: str
    traceback: str
    exit_code: int
    lost_peer: bool


def failure_of(error: BaseException, rank: int) -> Failure:
    """The Failure that `error`, raised by `rank`, stands for. Notes (`error.add_note`) belong to the message."""
    shoal_error = isinstance(error, ShoalError)
    message = "".join(traceback.TracebackException(type(error), error, None).format_exception_only()).strip()
    if isinstance(error, ShoalError):
        message = "\n".join([str(error), *getattr(error, "__notes__", [])])
    lost_peer = isinstance(error, LaunchError) or (
        isinstance(error, RuntimeError | OSError) and any(s in str(error) for s in _LOST_PEER)
    )
    text = "" if shoal_error else folded_traceback(error)
    return Failure(
        rank, socket.gethostname(), time.time(), message, text, error.exit_code if isinstance(error, ShoalError) else 1, lost_peer
    )


def write_failure(failure: Failure, path: Path) -> None:
    """Written aside and renamed, so that the launcher never reads half of it."""
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(asdict(failure)))
    aside.rename(path)


def read_failure(path: Path) -> Failure | None:
    """None if the rank wrote none."""
    return Failure(**json.loads(path.read_text())) if path.exists() else None


def folded_traceback(error: BaseException) -> str:
    """The traceback of `error`; runs of frames inside Shoal and torch are one line each, unless Shoal itself is where it broke."""
    summary = traceback.TracebackException.from_exception(error)
    if not _broke_in_shoal(summary):
        _fold(summary)
    return "".join(summary.format())


class _Folded(traceback.StackSummary):
    """A stack in which a frame whose name is a summary ("3 frames in torch") prints as that alone."""

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
            started = True  # what comes before is how the script was started
            yield from frames


def _broke_in_shoal(summary: traceback.TracebackException) -> bool:
    owners = [owner for frame in summary.stack if (owner := _owner(frame.filename)) in ("shoal", "user")]
    return not owners or owners[-1] == "shoal"


def _owner(filename: str) -> str:
    """Whose code a frame is: "shoal", "torch", "start" (how Python runs a script) or "user"."""
    if filename.startswith(_SHOAL + "/"):
        return "shoal"
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__ is not None and filename.startswith(str(Path(torch.__file__).parent) + "/"):
        return "torch"
    return "start" if filename in ("<frozen runpy>", "<frozen importlib._bootstrap>") else "user"
