"""Finds ranks that live and come no further.

A rank that trains and has committed no step for max(10 s, 5 x the median step) hangs, or waits for one that does. In an
evaluation it is to come further, by a microbatch, within 5 times the longest that this has taken, too; a save, or a
sample that the model writes, up to the next step, may take max(60 s, 5 x the longest one before). Those that are not in
a collective are missing there; where all ranks of this host train and are in one, the missing rank is elsewhere, and
the others' supervisors find it. In an evaluation, a save or a sample they may wait for long: whether a rank elsewhere
comes further, the members find out together (standstill.py). A stopped process (SIGSTOP, a debugger) is found sooner,
whatever it was doing.

What nobody has timed yet in a generation (its first step, microbatch of an evaluation, save, sample) has the time that
the job gives it: half an hour, since it may compile, read a cold disk, or wait for a slow machine. If that was too
short the next generation has twice as long, so that a job which is only slow goes on. A rank that is busy with what
cannot be timed, such as building the model, has no limit while it works, and others may wait for it; where it waits
itself it is late after that time.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.launch.board import BUSY, EVALUATION, FIRST, SAMPLE, SAVE, STEP, Progress

LEAST, SAVES, STEPS, STOPPED, ELSEWHERE = 10.0, 60.0, 5.0, 1.0, 2.0
"""Seconds without a step at least, and for a save; the same in median steps, or in the longest evaluations and saves
before; seconds for which a process may be stopped; seconds more until a host on which no rank is missing gives up
waiting for the others' supervisors."""
_DOES = {
    STEP: "committed no step",
    EVALUATION: "came no further in an evaluation",
    SAVE: "has not completed a save",
    SAMPLE: "has not written a sample",
    FIRST: "has not completed the first step",
}
_AT = {EVALUATION: "in an evaluation ", SAVE: "in a save ", SAMPLE: "writing a sample "}
_MORE = " (run.first_within; give more if it does not hang: the next generation has twice as long)"


@dataclass(frozen=True)
class Hang:
    """Ranks that hang. `ranks`: those on this host, none where they are elsewhere. `stopped`: because their processes
    are. `text`: which, and what each rank was in. `first`: in something that nobody has timed yet."""

    ranks: tuple[int, ...]
    stopped: bool
    text: str
    first: bool = False

    @property
    def here(self) -> bool:
        return bool(self.ranks)

    def of(self, ranks: list[int]) -> Hang:
        """Returns the hang where all waited and had to leave, and `ranks` have not left."""
        text = f"rank {_numbers(ranks)} does not leave what it is in: {self.text}"
        return replace(self, ranks=tuple(ranks), text=text)


class Watchdog:
    """Watches the ranks of a host in one generation. `patience`: how many times as long as the job says they have for
    what nobody has timed yet."""

    def __init__(self, patience: float = 1.0) -> None:
        self._patience = patience
        self._steps: deque[float] = deque(maxlen=64)
        self._timed = False  # a step was, since the first one began
        self._last: tuple[int, float] | None = None
        self._stopped: dict[int, float] = {}
        self._longest: dict[int, float] = {}  # by phase, as the ranks have measured it; none where it was not yet
        self.step = -1
        """The last step that any of the ranks has shown."""
        self.standstill: Hang | None = None
        """The hang that there is if no rank elsewhere comes further, either: all ranks here are late, and wait."""

    def look(self, boards: Mapping[int, Progress], stopped: set[int], now: float) -> Hang | None:
        """Returns the hang that there is now.

        boards: of the ranks that run, by number. stopped: those whose process is stopped. now: CLOCK_MONOTONIC.
        """
        self.step = max(self.step, *(board.step for board in boards.values()), -1)
        self._stopped = {rank: self._stopped.get(rank, now) for rank in stopped}
        self.standstill = None
        long = [
            rank
            for rank, since in self._stopped.items()
            if now - since >= STOPPED and (rank not in boards or now - boards[rank].alive >= STOPPED)  # not just slow
        ]
        if long:
            text = f"rank {_numbers(long)}: the process is stopped (SIGSTOP); {_places(boards, now)}"
            return Hang(tuple(long), True, text)
        self._time_steps(boards)
        longest = {
            EVALUATION: max((board.evaluation for board in boards.values()), default=0.0),
            SAVE: max((board.save for board in boards.values()), default=0.0),
            SAMPLE: max((board.sample for board in boards.values()), default=0.0),
        }
        self._longest = {phase: seconds for phase, seconds in longest.items() if seconds}
        works = {rank for rank, board in boards.items() if board.phase == BUSY and not board.waits}
        late = {
            rank: board
            for rank, board in boards.items()
            if rank not in works and now - board.stepped > self._limit_of(board)
        }
        missing = [rank for rank, board in late.items() if not board.waits]
        if not late or (works and not missing):
            return None
        seconds = min(now - board.stepped for board in late.values())
        untimed = [self._known(late[rank].phase) is None for rank in missing or late]
        first = all(untimed) if missing else any(untimed)
        more = _MORE if first else ""
        if missing:
            does = _DOES[late[missing[0]].phase]
            text = f"rank {_numbers(missing)} {does} for {seconds:.0f} s{more}; {_places(boards, now)}"
            return Hang(tuple(missing), False, text, first)
        wait = Hang((), False, f"all ranks here wait for others{more}; {_places(boards, now)}", first)
        self.standstill = wait if len(late) == len(boards) else None
        trains = all(board.phase in (STEP, FIRST) for board in boards.values())
        if trains and all(now - board.stepped > self._limit_of(board) + ELSEWHERE for board in late.values()):
            return wait
        return None

    def look_last(self, board: Progress) -> None:
        """Takes in what a rank had shown that has ended."""
        self.step = max(self.step, board.step)

    @property
    def median(self) -> float:
        """The seconds of a median step, 0 before the second one."""
        return statistics.median(self._steps) if self._steps else 0.0

    def _limit_of(self, board: Progress) -> float:
        """The seconds in which a rank is to come further."""
        if (known := self._known(board.phase)) is not None:
            return max(SAVES if board.phase in (SAVE, SAMPLE) else LEAST, known)
        return self._patience * board.first or float("inf")

    def _known(self, phase: int) -> float | None:
        """The seconds that a phase may take by how long it and the steps took before; None where it was not timed."""
        if phase == STEP:
            return STEPS * self.median if self._timed else None
        least = 0.0 if phase in (SAVE, SAMPLE) else STEPS * self.median
        return max(least, STEPS * self._longest[phase]) if phase in self._longest else None

    def _time_steps(self, boards: Mapping[int, Progress]) -> None:
        """Takes in the time of the last steps of the first rank, of which several may be done between two looks; the
        first step of all is not like the others. What was timed before holds no more under a new plan."""
        if not boards:
            return
        board = boards[min(boards)]
        if board.phase == FIRST:
            self._timed = False
        if self._last is not None and board.training and board.step > self._last[0]:
            if not self._timed:
                self._steps.clear()
            self._steps.append((board.stepped - self._last[1]) / (board.step - self._last[0]))
            self._timed = True
        if self._last is None or board.step != self._last[0] or not board.training:
            self._last = board.step, board.stepped


def _numbers(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _places(boards: Mapping[int, Progress], now: float) -> str:
    """Says what each rank is in."""
    said = []
    for rank, board in boards.items():
        at = f"{_AT.get(board.phase, '')}{f'after step {board.step}' if board.step >= 0 else 'before any step'}"
        at = "in its first step" if board.phase == FIRST else at
        where = f"in {board.where} for {now - board.waits:.0f} s" if board.waits else at
        said.append(f"rank {rank} is {where}")
    return ", ".join(said)
