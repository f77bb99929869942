"""Which ranks are much slower than the others, by what they tell of their own work.

A rank's pace is the seconds that a sample takes it: of its own time in steps, without that in which it waits for others
(jobs/pace.py). So a rank that all wait for differs from those that wait, and one with a larger share does not differ
from one with a smaller one. It is compared with that of ranks of other members which compute the same part of the
model; where there are none (each has a stage of its own), with its own best so far, beside what has become of the
others'.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.elastic.messages import Paces
from shoal.launch.board import Progress

TIMES, SECONDS = 3.0, 5.0
"""A member with a rank that takes so many times as long as others, for so many seconds, is slow. At least half of the
others are as fast as that, so without it the steps are shorter: 3 B / n samples' time before, B / (n - 1) after."""
STALE = 3.0
"""Seconds for which what a member has told holds."""


@dataclass(frozen=True)
class Pace:
    """The speed of `rank`, which computes `part` of the model: seconds a sample `now`, and the `best` that it had."""

    rank: int
    part: int
    now: float
    best: float


@dataclass(frozen=True)
class Straggler:
    """A slow member: its rank `rank` takes `times` as long as others."""

    name: str
    rank: int
    times: float

    @property
    def text(self) -> str:
        return f"rank {self.rank} of {self.name} is {self.times:.1f} times as slow as others"


def paces_of(generation: int, boards: Mapping[int, Progress]) -> Paces | None:
    """Returns what a member tells of its ranks, by what they show; None where none has shown its pace yet."""
    slowest: dict[int, tuple[int, float, float]] = {}
    for rank, board in boards.items():
        if board.training and board.pace > slowest.get(board.part, (0, 0.0))[1]:
            slowest[board.part] = rank, board.pace, board.best
    ranks, now, best = map(list, zip(*slowest.values(), strict=True)) if slowest else ([], [], [])
    return Paces(generation, ranks, list(slowest), now, best) if slowest else None


def told_in(message: Paces) -> list[Pace]:
    """Returns what a member has told. Raises ValueError for what cannot be."""
    columns = (message.ranks, message.parts, message.now, message.best)
    if len({len(each) for each in columns}) != 1 or not all(
        math.isfinite(each) and each > 0 for each in (*message.now, *message.best)
    ):
        raise ValueError("paces are seconds above 0, as many as ranks")
    return [Pace(*row) for row in zip(*columns, strict=True)]


class Stragglers:
    """Finds the slow members of a generation. All times are of one clock (time.monotonic)."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, float, list[Pace]]] = {}
        self._since: dict[str, float] = {}

    def take(self, name: str, message: Paces, now: float) -> None:
        """Takes in what a member tells of its ranks. Raises ValueError for what cannot be."""
        self._told[name] = message.generation, now, told_in(message)

    def forget(self, name: str) -> None:
        """Forgets what a member has told."""
        self._told.pop(name, None)
        self._since.pop(name, None)

    def look(self, generation: int, members: Collection[str], now: float) -> Straggler | None:
        """Returns the slowest of the `members` of a generation that has been slow for SECONDS, None if none has."""
        known = {
            name: ranks
            for name, (number, at, ranks) in self._told.items()
            if name in members and number == generation and now - at <= STALE and ranks
        }
        slow, everybody = {}, Company(known.values())
        for name, ranks in known.items():
            times, rank = max((everybody.times_of(pace, ranks), pace.rank) for pace in ranks)
            if times >= TIMES:
                slow[name] = Straggler(name, rank, times)
        self._since = {name: self._since.get(name, now) for name in slow}
        lasting = [each for name, each in slow.items() if now - self._since[name] >= SECONDS]
        return max(lasting, key=lambda each: each.times, default=None)


class Company:
    """The ranks of all members, each of which is compared with those of the others. Their figures are sorted once: to
    collect the others' for each member would take the square of their number. `members`: what each of them has told."""

    def __init__(self, members: Iterable[Sequence[Pace]]) -> None:
        ranks = [pace for own in members for pace in own]
        parts: dict[int, list[float]] = defaultdict(list)
        for each in ranks:
            parts[each.part].append(each.now)
        self._nows = {part: sorted(nows) for part, nows in parts.items()}
        self._grown = sorted(each.now / each.best for each in ranks)

    def times_of(self, pace: Pace, own: Sequence[Pace]) -> float:
        """Returns how many times as long as the others a rank takes, whose member has told `own`; 1 where nobody can
        tell."""
        nows, mine = self._nows[pace.part], [each.now for each in own if each.part == pace.part]
        if peers := len(nows) - len(mine):
            return pace.now / _without(nows, mine, (peers - 1) // 2)
        if not (others := len(self._grown) - len(own)):
            return 1.0
        grown = [each.now / each.best for each in own]
        middle = [_without(self._grown, grown, place) for place in ((others - 1) // 2, others // 2)]
        return (pace.now / pace.best) / max(1.0, statistics.mean(middle))


def _without(values: list[float], own: list[float], place: int) -> float:
    """Returns what is at `place` of sorted values when `own`, which are some of them, are taken out."""
    for each in sorted(own):
        place += bisect_left(values, each) <= place
    return values[place]
