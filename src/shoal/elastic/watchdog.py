"""Finds ranks that live and come no further.

A rank that trains and has committed no step for max(10 s, 5 x the median step) hangs, or waits for one that does. In an
evaluation it is to come further, by a microbatch, within 5 times the longest that this has taken, too; a save, up to
the next step, may take max(60 s, 5 x the longest one before). Those that are not in a collective are missing there;
where all ranks of this host train and are in one, the missing rank is elsewhere, and the others' supervisors find it. A
stopped process (SIGSTOP, a debugger) is found sooner, whatever it was doing.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.launch.board import BUSY, EVALUATION, SAVE, STEP, Progress

LEAST, SAVES, STEPS, STOPPED, ELSEWHERE = 10.0, 60.0, 5.0, 1.0, 2.0
"""Seconds without a step at least, and for a save; the same in median steps, or in the longest evaluations and saves
before; seconds for which a process may be stopped; seconds more until a host on which no rank is missing gives up
waiting for the others' supervisors."""
_DOES = {STEP: "committed no step", EVALUATION: "came no further in an evaluation", SAVE: "has not completed a save"}
_AT = {EVALUATION: "in an evaluation ", SAVE: "in a save "}


@dataclass(frozen=True)
class Hang:
    """Ranks that hang. `ranks`: those on this host, none where they are elsewhere. `stopped`: because their processes
    are. `text`: which, and what each rank was in."""

    ranks: tuple[int, ...]
    stopped: bool
    text: str

    @property
    def here(self) -> bool:
        return bool(self.ranks)


class Watchdog:
    """Watches the ranks of a host in one generation."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=64)
        self._last: tuple[int, float] | None = None
        self._stopped: dict[int, float] = {}
        self._before: dict[int, Progress] = {}
        self._longest: dict[int, float] = {}  # by phase: between two signs of a rank that it comes further
        self.step = -1
        """The last step that any of the ranks has shown."""

    def look(self, boards: Mapping[int, Progress], stopped: set[int], now: float) -> Hang | None:
        """Returns the hang that there is now.

        boards: of the ranks that run, by number. stopped: those whose process is stopped. now: CLOCK_MONOTONIC.
        """
        self.step = max(self.step, *(board.step for board in boards.values()), -1)
        self._stopped = {rank: self._stopped.get(rank, now) for rank in stopped}
        long = [
            rank
            for rank, since in self._stopped.items()
            if now - since >= STOPPED and (rank not in boards or now - boards[rank].alive >= STOPPED)  # not just slow
        ]
        if long:
            text = f"rank {_numbers(long)}: the process is stopped (SIGSTOP); {_places(boards, now)}"
            return Hang(tuple(long), True, text)
        self._time_steps(boards)
        self._time_others(boards)
        late = {rank: board for rank, board in boards.items() if now - board.stepped > self._limit_of(board.phase)}
        if not late or any(board.phase == BUSY for board in boards.values()):
            return None
        missing = [rank for rank, board in late.items() if not board.waits]
        seconds = min(now - board.stepped for board in late.values())
        if missing:
            does = _DOES[late[missing[0]].phase]
            text = f"rank {_numbers(missing)} {does} for {seconds:.0f} s; {_places(boards, now)}"
            return Hang(tuple(missing), False, text)
        if seconds > self.limit + ELSEWHERE and all(board.training for board in boards.values()):
            return Hang((), False, f"all ranks here wait for others; {_places(boards, now)}")
        return None

    def look_last(self, board: Progress) -> None:
        """Takes in what a rank had shown that has ended."""
        self.step = max(self.step, board.step)

    @property
    def limit(self) -> float:
        """The seconds in which a step is to be committed."""
        return max(LEAST, STEPS * self.median) if self._steps else float("inf")

    @property
    def median(self) -> float:
        """The seconds of a median step, 0 before the second one."""
        return statistics.median(self._steps) if self._steps else 0.0

    def _limit_of(self, phase: int) -> float:
        """The seconds in which a rank is to come further."""
        if phase == STEP:
            return self.limit
        least = SAVES if phase == SAVE else max(LEAST, STEPS * self.median)
        return max(least, STEPS * self._longest[phase]) if phase in self._longest else float("inf")

    def _time_others(self, boards: Mapping[int, Progress]) -> None:
        """Takes in how long ranks that evaluate or save took to come further."""
        for rank, board in boards.items():
            before = self._before.get(rank, board)
            if before.phase in _AT and board.stepped > before.stepped:
                took = board.stepped - before.stepped
                self._longest[before.phase] = max(took, self._longest.get(before.phase, 0.0))
        self._before = dict(boards)

    def _time_steps(self, boards: Mapping[int, Progress]) -> None:
        """Takes in the time of the last step of the first rank; the first step of all is not like the others."""
        if not boards:
            return
        board = boards[min(boards)]
        if self._last is not None and board.training and board.step == self._last[0] + 1:
            self._steps.append(board.stepped - self._last[1])
        if self._last is None or board.step != self._last[0] or not board.training:
            self._last = board.step, board.stepped


def _numbers(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _places(boards: Mapping[int, Progress], now: float) -> str:
    """Says what each rank is in."""
    said = []
    for rank, board in boards.items():
        at = f"{_AT.get(board.phase, '')}after step {board.step}"
        where = f"in {board.where} for {now - board.waits:.0f} s" if board.waits else at
        said.append(f"rank {rank} is {where}")
    return ", ".join(said)
