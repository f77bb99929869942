"""What the schedule of a pipeline does: the share of a step that ranks wait, from the real lists of actions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from shoal.pipeline import Costs, Schedule, kept, make_schedule, simulate
from shoal.pipeline.actions import Action, Kind

HALVED = ("zb1p", "zbv")
"""Schedules with backwards in two halves."""
THERE_AND_BACK = ("zbv",)
"""Schedules that go to the last rank and come back, so that the first one has the last stage too."""
FEW = 8
"""Ranks up to which the lists of zbv are made where microbatches are few: they are found by trial."""
LARGE = 4000
"""Actions of a schedule up to which it is simulated whole; beyond, what more microbatches take is extrapolated."""


class Pace(NamedTuple):
    """Seconds of a microbatch on a stage: of its `forward`, and of its `backward` on the average of a step, of which
    `again` is computed again by a backward that runs as a whole, and by each half of one in two halves; `parted`: the
    share of these."""

    forward: float
    backward: float
    again: float = 0.0
    parted: float = 0.0


Places = tuple[tuple[int, ...], ...]
"""The stages of each rank of a pipeline, in ascending order."""


@cache
def placed(ranks: int, stages: int, back: bool = False) -> Places:
    """Where so many stages are: from the first rank to the last and from the first again, or, there and `back`, to the
    first."""
    empty = Schedule("", ranks, stages // ranks, 0, (), "v" if back else "loop")
    return tuple(tuple(empty.stages_of(rank)) for rank in range(ranks))


def slowest(stages: Sequence[Pace], places: Places) -> tuple[int, float]:
    """The rank of a pipeline that takes longest for a microbatch of all its stages, and its seconds."""
    seconds = of_ranks(stages, places)
    most = max(seconds)
    return seconds.index(most), most


def of_ranks(stages: Sequence[Pace], places: Places) -> list[float]:
    """The seconds of a microbatch of all stages of each rank of a pipeline."""
    whole = [each[0] + each[1] for each in stages]
    return whole if len(whole) == len(places) else [sum(whole[stage] for stage in own) for own in places]


def passed_on(given: Sequence[float], places: Places) -> list[float]:
    """The bytes that each rank of a pipeline sends for a row, where each stage but the first is `given` so many, and
    hands back as many."""
    sent, rank_of = [0.0] * len(places), {stage: rank for rank, own in enumerate(places) for stage in own}
    for stage, nbytes in enumerate(given[1:], 1):
        before, own = rank_of[stage - 1], rank_of[stage]
        for rank in (before, own) if before != own else ():
            sent[rank] += nbytes
    return sent


@lru_cache(maxsize=4096)
def under_way(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """For each rank the most microbatches of each of its stages that wait for their backward together. Of many
    microbatches a few are enough, with as many left over in the last group of as many as there are ranks: the schedule
    repeats itself, or all forwards come first, and all wait. By formulas for 1f1b and zb1p, whose lists are long where
    there are hundreds of ranks, and for zbv, but for a few microbatches on few ranks; on many these are as many at
    most."""
    if name == "1f1b" and chunks == 1:
        return tuple((min(microbatches, ranks - rank),) for rank in range(ranks))
    if name == "zb1p" and chunks == 1:
        return ((min(microbatches, ranks),),) * ranks
    if name == "zbv" and (microbatches >= 2 * ranks - 1 or ranks > FEW):
        back = 2 * ranks - microbatches
        return tuple(
            (min(microbatches, 2 * ranks - 1 - rank), min(microbatches, max(1 + rank, back))) for rank in range(ranks)
        )
    few = min(microbatches, 3 * ranks + microbatches % ranks)
    schedule = make_schedule(name, ranks, few, chunks)
    found = []
    for rank, order in enumerate(schedule.orders):
        own = schedule.stages_of(rank)
        most = max((dict(now) for now in kept(order)), key=lambda now: sum(now.values()))
        found.append(tuple(most.get(stage, 0) for stage in own))
    all_wait = all(number == few for numbers in found for number in numbers)
    return ((microbatches,) * chunks,) * ranks if all_wait else tuple(found)


@lru_cache(maxsize=4096)
def parted(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[float, ...]:
    """For each stage the share of its backwards that run in two halves, of which the first one leaves something to the
    second. Of many microbatches a few are enough; of zbv see `under_way`."""
    if name not in HALVED:
        return (0.0,) * (ranks * chunks)
    if name == "zbv" and (microbatches >= 2 * ranks - 1 or ranks > FEW):
        most = max(microbatches, 1) if microbatches >= 2 * ranks - 1 else 1  # else all of them
        numbers = (*(2 * ranks - rank for rank in range(1, ranks)), *(ranks - 1,) * ranks)
        return (0.0, *(min(1.0, each / most) for each in numbers))
    if name == "zb1p" and chunks == 1:  # all of them: each W is that of an earlier microbatch
        return (0.0, *(1.0,) * (ranks - 1))
    few = min(microbatches, 4 * ranks)
    schedule = make_schedule(name, ranks, few, chunks)
    halves = Counter(each.stage for order in schedule.orders for each in order if each.kind == "I")
    return tuple(halves[stage] / few if stage else 0.0 for stage in range(schedule.stages))  # nobody waits for stage 0


def fill(name: str, ranks: int, number: int, chunks: int, forward: float, backward: float) -> float:
    """Seconds in which a rank waits for the others in a step of `number` microbatches. `forward` and `backward`: of all
    chunks of all of these, one after the other. Where all stages take as long it is what the lists of actions do, but
    for zb1p in chunks, which waits longer where microbatches are few, and zbv, about, where forwards do not take as
    long as each half of a backward."""
    if chunks == 1 and name not in HALVED:
        return forward + backward
    others, few = ranks - 1, max(0, ranks - number)
    longer, shorter = max(forward, backward / 2), min(forward, backward / 2)  # the weights' half fills the rest
    if name == "zbv":
        return longer - shorter / 2 + shorter * (few + max(0.0, ranks / 2 - number)) / others
    if chunks == 1:
        return longer + shorter * few / others
    last = number % ranks or ranks  # microbatches go in groups of as many as ranks
    share = (chunks * (ranks - last) + last - 1) / (chunks * others)
    return share * (longer if name in HALVED else forward + backward)


def longer_by(stages: Sequence[Pace], number: int) -> float:
    """Seconds by which a step of `number` microbatches by 1f1b, one stage a rank, takes longer than its slowest rank
    works. A rank waits for the first forward and for the last backward of those before it, and once for those behind
    it, beside the forwards that it runs meanwhile; the step ends with the last rank that has waited."""
    whole = [each.forward + each.backward for each in stages]
    longest, before = 0.0, 0.0
    for rank, (each, own) in enumerate(zip(stages, whole, strict=True)):
        behind = sum(whole) - before - own
        ahead = min(len(stages) - 1 - rank, number - 1) * each.forward
        longest = max(longest, number * own + before + max(0.0, behind - ahead))
        before += own
    return longest - number * max(whole)


class Crowd(NamedTuple):
    """How ranks share cores: `share` of them one, of `ranks` on a host, which has so many `stages` of a pipeline: those
    of other hosts have cores of their own."""

    share: float = 1.0
    ranks: int = 1
    stages: int = 1

    @property
    def most(self) -> float:
        """How many times faster a stage is at most while others wait."""
        return min(self.share, self.stages)

    def speed(self, active: float) -> float:
        """How many times faster than while all compute those do that are `active`, a share of the ranks of a host,
        while the others wait. A system leaves ranks on their cores for milliseconds, longer than they wait, so some
        cores stay idle while others have two: as many as where each rank has its core by chance."""
        number, left = active * self.ranks, (1 - active) * self.ranks
        idle = 0.0  # the share of cores none of whose ranks compute
        if left >= self.share:
            logarithm = math.lgamma(self.ranks - self.share + 1) + math.lgamma(left + 1)
            logarithm -= math.lgamma(left - self.share + 1) + math.lgamma(self.ranks + 1)
            idle = math.exp(logarithm)
        return min(self.share, (1 - idle) * self.ranks / number)


ALONE = Crowd()
"""Each rank has cores of its own."""


def waiting(fill: float, busy: float, stages: int, crowd: float) -> float:
    """Seconds by which a step is longer than the `busy` ones of a rank that waits for `fill` seconds in between, where
    `crowd` ranks of a host, which has so many `stages`, share a core: those that compute meanwhile take the core of
    those that wait."""
    return max(0.0, (busy + fill) / min(crowd, stages) - busy)


def shared(seconds: Sequence[float], crowd: Crowd) -> float:
    """Seconds that the ranks of a pipeline take at least together which take so many each: where those of a host share
    cores, the ones that end early help the others."""
    if crowd.most <= 1:
        return max(seconds)
    hosts = (seconds[first : first + crowd.stages] for first in range(0, len(seconds), crowd.stages))
    return max(sum(own) / len(own) for own in hosts)


def waits(fill: float, sends: float, busy: float, crowd: Crowd, least: float) -> tuple[float, float]:
    """Seconds by which a step is longer than the `busy` ones of the rank that works longest, which waits `fill` seconds
    for other stages and `sends` for their messages: what it waits for stages, and for messages. Where ranks share
    cores, those that compute meanwhile have them for all of that time; what is left is for messages, if they take as
    long. `least`: seconds that all take together (see shared): where that rank is helped it waits less than none."""
    if crowd.most <= 1:
        return waiting(fill, busy, crowd.stages, crowd.share), sends
    seconds = max(least, (busy + fill + sends) / crowd.most)
    stages = min(sends, max(0.0, seconds - busy))
    return seconds - busy - stages, stages


def actions(ranks: int, microbatches: int, chunks: int) -> int:
    """How many actions are simulated, but for the halves of backwards."""
    few, more = _simulated_of(ranks, chunks)
    return 2 * ranks * chunks * (microbatches if microbatches <= more else few + more)


def _simulated_of(ranks: int, chunks: int) -> tuple[int, int]:
    """Microbatches of the two shorter steps that are simulated instead of a long one."""
    most = max(2, LARGE // (2 * ranks * chunks))
    return max(ranks, most // 2), max(2 * ranks, most)


def simulated(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    stages: Sequence[Pace],
    message: float,
    crowd: Crowd = ALONE,
) -> float:
    """Seconds of a step by event simulation of the schedule's own lists of actions. `stages`: seconds of each, while
    all ranks compute."""
    return _simulated(name, ranks, microbatches, chunks, tuple(stages), message, crowd)


@lru_cache(maxsize=4096)
def _simulated(
    name: str, ranks: int, microbatches: int, chunks: int, stages: tuple[Pace, ...], message: float, crowd: Crowd
) -> float:
    few, more = _simulated_of(ranks, chunks)
    costs = costs_of(stages, message)

    def run(number: int) -> float:
        schedule = make_schedule(name, ranks, number, chunks)
        return simulate(schedule, costs).seconds if crowd.most == 1.0 else _crowded(schedule, costs, crowd)

    if microbatches <= more:
        return run(microbatches)
    last = microbatches % ranks  # of the last group: interleaved runs groups of as many as ranks
    few, more = (each - each % ranks + last for each in (few, more))
    first, second = run(few), run(more)
    return second + (second - first) * (microbatches - more) / (more - few)


def costs_of(stages: Sequence[Pace], message: float) -> Costs:
    """What the actions of a schedule take: either half of a backward takes half of one without what is computed again,
    and all of that."""
    seconds: dict[tuple[Kind, int], float] = {}
    for stage, (forward, backward, again, share) in enumerate(stages):
        whole = backward - share * again
        seconds[("F", stage)], seconds[("B", stage)] = forward, whole
        seconds[("I", stage)] = seconds[("W", stage)] = (whole + again) / 2
    return Costs(seconds, message)


def _crowded(schedule: Schedule, costs: Costs, crowd: Crowd) -> float:
    """Seconds of a schedule whose ranks share the cores of their host in equal parts."""
    ends: dict[Action, float] = {}
    places = [0] * schedule.ranks
    under_way: dict[int, float] = {}  # by rank what is left of its action, at the speed while all compute
    now, number = 0.0, sum(map(len, schedule.orders))
    speeds = [crowd.speed(active / crowd.stages) for active in range(1, 1 + crowd.stages)]
    while len(ends) < number:
        arrivals = []
        for rank, order in enumerate(schedule.orders):
            if rank in under_way or places[rank] == len(order):
                continue
            action = order[places[rank]]
            needs = schedule.needs(action)
            if all(need in ends for need in needs):
                apart = (costs.message * (schedule.rank_of(need.stage) != rank) for need in needs)
                start = max((ends[need] + more for need, more in zip(needs, apart, strict=True)), default=now)
                if start <= now:
                    under_way[rank] = costs.of(action)
                else:
                    arrivals.append(start)
        active = Counter(rank // crowd.stages for rank in under_way)  # by host
        speed = {rank: speeds[active[rank // crowd.stages] - 1] for rank in under_way}
        first = min((left / speed[rank] for rank, left in under_way.items()), default=float("inf"))
        step = min([first, *(start - now for start in arrivals)])
        now += step
        for rank in list(under_way):
            under_way[rank] -= step * speed[rank]
            if under_way[rank] <= 1e-12 * now:
                ends[schedule.orders[rank][places[rank]]] = now
                places[rank] += 1
                del under_way[rank]
    return now
