"""The report of a failed run: the rank at fault first and in full, the others in a line each, and the exit code."""

from __future__ import annotations

import signal
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import LaunchError
from shoal.launch.failure import Failure
from shoal.launch.store import rank_list

_TAIL = 20  # lines of captured output that are shown
_LEAVING = 2.0  # seconds from the moment a process closes its groups, which others notice, to its end
_HINTS = {
    signal.SIGKILL: "often the kernel's out-of-memory killer: look at `dmesg`, take a smaller microbatch "
    "or fewer ranks",
    signal.SIGBUS: "often shared memory is full: look at `df /dev/shm`",
    signal.SIGSEGV: "a crash in native code: its Python stack is in the rank's output",
    signal.SIGABRT: "an assertion in native code: the reason is in the rank's output",
}


@dataclass(frozen=True)
class Ending:
    """The end of one rank.

    returncode: negative for a signal.
    seconds: Unix time of the end.
    stopped: the launcher ended it.
    log: the file with its output; None where that went to the terminal.
    """

    rank: int
    host: str
    returncode: int
    seconds: float
    stopped: bool
    failure: Failure | None
    log: Path | None

    @property
    def failed(self) -> bool:
        return self.failure is not None or (self.returncode != 0 and not self.stopped)

    @property
    def exit_code(self) -> int:
        if self.failure is not None:
            return self.failure.exit_code
        return self.returncode if self.returncode > 0 else LaunchError.exit_code


def verdict(endings: list[Ending], ranks: int | None = None) -> tuple[str, int]:
    """Returns the report and the exit code of a run; ("", 0) if no rank failed.

    ranks: how many there are, where not all have ended.

    The rank at fault is the first that failed by itself, or else the first that lost a peer.
    """
    failed = sorted((ending for ending in endings if ending.failed), key=_blame)
    if not failed:
        return "", 0
    if (gone := _left_early(endings, failed)) is not None:
        failed.insert(0, gone)
    first = failed[0]
    lines: dict[str, list[int]] = defaultdict(list)
    for ending in endings:
        if ending is not first and (ending.failed or ending.stopped):
            lines[_one_line(ending, first)].append(ending.rank)
    same = lines.pop("the same error", [])
    who = sorted([first.rank, *same])
    every = len(who) == (ranks or len(endings))
    parts = [_in_full(first, "" if every else f"rank {rank_list(who)} on host {first.host}")]
    if first.log is not None and (first.failure is None or first.failure.traceback):
        parts += _tail(first.rank, first.log)
    parts += [f"rank {rank_list(ranks)}: {line}" for line, ranks in lines.items()]
    return "\n".join(parts), first.exit_code


def _left_early(endings: list[Ending], failed: list[Ending]) -> Ending | None:
    """Returns the first rank that ended without an error before the others, where those only failed because it left."""
    if not all(ending.failure is not None and ending.failure.lost_peer for ending in failed):
        return None
    since = min(_blame(ending)[1] for ending in failed) + _LEAVING
    gone = [each for each in endings if not each.failed and not each.stopped and each.seconds < since]
    return min(gone, key=lambda ending: ending.seconds, default=None)


def _blame(ending: Ending) -> tuple[bool, float]:
    failure = ending.failure
    return (failure.lost_peer, failure.seconds) if failure is not None else (False, ending.seconds)


def _in_full(ending: Ending, who: str) -> str:
    failure = ending.failure
    if failure is None:
        return f"error: {who or 'every rank'} {_cause(ending.returncode)}"
    if not failure.traceback:
        return f"error: {who + ': ' if who else ''}{failure.message}"
    return f"error: {who or 'every rank'} failed:\n{failure.traceback.rstrip()}"


def _one_line(ending: Ending, first: Ending) -> str:
    failure = ending.failure
    if failure is None:
        return "stopped by the launcher" if ending.stopped else _cause(ending.returncode)
    if first.failure is not None and failure.message == first.failure.message:
        return "the same error"
    return f"{'lost its peer' if failure.lost_peer else 'failed'}: {failure.message.splitlines()[0]}"


def _cause(returncode: int) -> str:
    if returncode == 0:
        remedy = "every rank runs the script to its end (look for sys.exit or return)"
        return f"ended with exit code 0 while the others were still at work: {remedy}"
    if returncode > 0:
        return f"ended with exit code {returncode}"
    name = signal.Signals(-returncode)
    hint = _HINTS.get(name)
    return f"was killed by signal {-returncode} ({name.name})" + (f": {hint}" if hint else "")


def _tail(rank: int, log: Path) -> list[str]:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    if not lines:
        return []
    left_out = len(lines) - _TAIL
    head = [f"[rank {rank}] ... {left_out} lines before"] if left_out > 0 else []
    return [f"the last output of rank {rank}:", *head, *(f"[rank {rank}] {line}" for line in lines[-_TAIL:])]
