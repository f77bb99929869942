"""Runs a small model for a moment and times it: its forward and its backward, by how much a step is longer whose
backward computes blocks again, and how much longer Python takes that comes once after them."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import torch

from shoal.comm import World
from shoal.device import OnceMore
from shoal.module.border import cast_at_the_border
from shoal.module.compiling import blocks, graphs, recomputable
from shoal.module.random import host_draws
from shoal.module.recompute import Recompute, without_caches
from shoal.native.heap import keep_freed_memory
from shoal.planner.prepare import Subject
from shoal.training.loss import sums_of

log = logging.getLogger(__name__)

ENOUGH, TIMES = 0.3, 4
"""Seconds of a forward and backward after which no others are tried, and how many times as many rows are tried next.
After the first half as many: of one number of rows alone it is not known what comes once, whatever their number, and
many of them would be taken for twice as long as they are."""
ROUNDS, LONGEST = 12, 3.0
"""Microbatches of so many rows that are timed, by each way, and seconds after which no more are begun, but for the
first of them: the one before, which warms up, may itself take so long."""
WAYS = ("selective", "full")
"""The ways to compute blocks again that are timed."""


class Ran(NamedTuple):
    """Seconds of a forward, and of a backward, of so many rows on a rank; and how many more both take together where
    backward computes some operations of the blocks again, or all: 0 where that was not timed. `cold`: how many times
    longer Python takes after them than where it is repeated; 0 where that was not timed."""

    rows: int
    forward: float
    backward: float
    some: float
    full: float
    cold: float = 0.0


class Timed(NamedTuple):
    """Seconds of one forward and its backward, and of both by each of WAYS, 0 where that was not run. `cold`: how many
    times longer Python took right after the first than where it is repeated."""

    forward: float
    backward: float
    ways: Sequence[float]
    cold: float

    @property
    def whole(self) -> float:
        return self.forward + self.backward


class Alone:
    """How a rank runs a model that no other one runs meanwhile."""

    crowd = 1.0
    """How many ranks share a core."""

    def goes_on(self, own: bool) -> bool:
        """Whether another microbatch is run; `own`: what this rank alone would say."""
        return own

    def agreed(self, own: list[Timed] | None) -> list[list[Timed]]:
        """The times of all who run, of each a list of its rounds; none where one has failed, which gives None."""
        return [] if own is None else [own]


class Together:
    """How each of the ranks of a world runs it, all at once. `crowd`: see `Alone`."""

    def __init__(self, world: World, crowd: float) -> None:
        self._everyone, self.crowd = world.everyone, crowd

    def goes_on(self, own: bool) -> bool:
        """What the first rank says, once all are there. A collective call."""
        return bool(self._everyone.all_gather_object(own)[0])

    def agreed(self, own: list[Timed] | None) -> list[list[Timed]]:
        """See `Alone`. A collective call."""
        every = self._everyone.all_gather_object(own)
        return [] if None in every else [[Timed(*each) for each in rounds] for rounds in every]


def run(subject: Subject, rows: Sequence[int], threads: int, how: Alone | Together) -> tuple[Ran, ...]:
    """Returns what the model of `subject` takes on so many threads, of microbatches of each number of `rows` until one
    takes long or does not run."""
    before, found, timed = torch.get_num_threads(), list[Ran](), _Timer(subject, how.crowd)
    torch.set_num_threads(threads)
    keep_freed_memory()  # as of a rank
    try:
        with torch.random.fork_rng(devices=[]), host_draws(0):
            for number in rows:
                if not (every := how.agreed(timed.rounds(number, how))):
                    why = timed.error or "on another rank"
                    log.info("the model does not run with %d rows, so what these take is counted: %s", number, why)
                    break
                found.append(_merged(number, every, how.crowd))
                most = ENOUGH / TIMES if len(found) > 1 else ENOUGH / 2
                if found[-1].forward + found[-1].backward > most:
                    break
    finally:
        torch.set_num_threads(before)
    return tuple(found)


class _Timer:
    """Runs models of its own. `crowd`: see `Alone`; `error`: why the plain one does not run; empty where it does."""

    def __init__(self, subject: Subject, crowd: float) -> None:
        self._subject, self._crowd, self.error = subject, crowd, ""
        self._python = OnceMore()
        self._modules: dict[str, torch.nn.Module] = {}  # as it is, "", and by those of WAYS that run

    def rounds(self, rows: int, how: Alone | Together) -> list[Timed] | None:
        """What each of ROUNDS microbatches of `rows` rows takes, or of as many as begin within LONGEST, after one that
        warms up; None where one fails."""
        began, taken = time.monotonic(), list[Timed]()

        def may_begin() -> bool:
            enough = len(taken) > ROUNDS or time.monotonic() - began > LONGEST
            return not self.error and not (len(taken) > 1 and enough)

        while how.goes_on(may_begin()):
            if not self.error:  # the others may not have met it
                try:
                    taken.append(self._round(rows))
                except Exception as error:  # somebody else's code, which may ask for other rows
                    self.error = f"{type(error).__name__}: {error}"
        return None if self.error else taken[1:]

    def _round(self, rows: int) -> Timed:
        self._modules = self._modules or _made(self._subject)
        forward, backward = self._run(self._modules[""], rows)
        cold = self._python.seconds() / self._python.repeated
        return Timed(forward, backward, [self._again(way, rows) for way in WAYS], cold)

    def _again(self, way: str, rows: int) -> float:
        if way not in self._modules:
            return 0.0
        try:
            return sum(self._run(self._modules[way], rows))
        except Exception as error:  # a model that cannot be computed again, of which nobody has asked that
            log.info("with recompute %r the model does not run, so what that takes is counted: %s", way, error)
            del self._modules[way]
            return 0.0

    def _run(self, module: torch.nn.Module, rows: int) -> tuple[float, float]:
        given = {key: torch.stack([value] * rows) for key, value in self._subject.sample.items()}  # a loss may write
        began = Clock.now()
        sums = sums_of(self._subject.loss, module, given, ())
        total = sum(sums.aux.values(), sums.total)
        between = Clock.now()
        total.backward()
        ended = Clock.now()
        module.zero_grad()
        return between.since(began, self._crowd), ended.since(between, self._crowd)


class Clock(NamedTuple):
    """Seconds of the wall, of this process on cores, and in which this thread waited for a core."""

    wall: float
    busy: float
    queued: float | None

    @classmethod
    def now(cls) -> Clock:
        queued = None
        with suppress(OSError, ValueError, IndexError):  # other systems than Linux do not tell
            queued = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
        return cls(time.perf_counter(), time.process_time(), queued)

    def since(self, began: Clock, crowd: float) -> float:
        """The seconds since `began`; of `crowd` ranks that share a core, those that it takes where each has the core as
        long as the others: who waits for whom changes from one moment to the next, and a step of many microbatches
        takes the mean."""
        wall = self.wall - began.wall
        if crowd == 1 or self.queued is None or began.queued is None:
            return wall
        return wall - (self.queued - began.queued) + (crowd - 1) * (self.busy - began.busy)


def _made(subject: Subject) -> dict[str, torch.nn.Module]:
    """Copies of the model of `subject` as an engine runs it: as it is, and by each of WAYS where it has blocks."""
    own = deepcopy(subject.factory())  # may be the caller's own, to whom a forward is to do nothing
    own = own.to(subject.precision.model).train()
    without_caches(own)
    found = {"": own}
    for way in WAYS if recomputable(own) else ():
        found[way] = deepcopy(own)
        Recompute(recomputable(found[way]), way)
    for each in found.values():
        inside = (block for block in blocks(each) if block is not each)
        cast_at_the_border(each, subject.precision, [*graphs(each, by_plan=False), *inside])
    return found


def _merged(rows: int, every: Sequence[Sequence[Timed]], crowd: float) -> Ran:
    """What all who ran took, the median over rounds: until the last of them was there; where they share cores, the mean
    of all, since the core of one that is there first goes to the others."""
    rounds = list(zip(*every, strict=True))
    all_of: Callable[[list[float]], float] = statistics.mean if crowd > 1 else max
    whole = statistics.median(all_of([each.whole for each in of_round]) for of_round in rounds)
    share = statistics.median(each.forward / each.whole for of_round in rounds for each in of_round)
    some, full = (_more(rounds, place, all_of) for place in range(len(WAYS)))
    cold = statistics.median(each.cold for of_round in rounds for each in of_round)
    return Ran(rows, share * whole, (1 - share) * whole, some, full, max(1.0, cold))


def _more(rounds: Sequence[Sequence[Timed]], place: int, all_of: Callable[[list[float]], float]) -> float:
    """What a round took longer by one of WAYS than without, the median over those in which all ran it; 0 for none."""
    timed = [of_round for of_round in rounds if all(each.ways[place] for each in of_round)]
    more = [all_of([each.ways[place] for each in own]) - all_of([each.whole for each in own]) for own in timed]
    return max(0.0, statistics.median(more)) if more else 0.0
