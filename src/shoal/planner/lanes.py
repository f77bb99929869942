"""The stages of a model as the search prices them: which pieces each has, what a microbatch of it takes, and what its
blocks free and cost that are computed again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import is_

from shoal.module.chosen_blocks import over_budget
from shoal.planner.computing import HALVED, HALVED_TENSOR, python_of
from shoal.planner.costs import Prices
from shoal.planner.cuts import Cuts
from shoal.planner.degrees import Spread
from shoal.planner.knapsack import Counts, Front, Kind, front
from shoal.planner.pipes import HALVED as IN_HALVES
from shoal.planner.pipes import Crowd, Pace, fill, longer_by, of_ranks, shared, slowest, waits
from shoal.planner.sizes import POLICIES
from shoal.planner.task import Choice


@dataclass(frozen=True)
class Work:
    """Seconds of a microbatch of one stage without recompute: of computing on the slowest device, `halving` of a
    backward in halves beside it, and of what is sent, in each direction and by what ranks divide."""

    forward: float
    backward: float
    halving: float
    sent_forward: float
    sent_backward: float
    sent: dict[str, float]


class Lane:
    """Microbatches of `rows` rows, on average `mean`, on a pipeline's stages. `policies`: how blocks may be treated."""

    def __init__(
        self, prices: Prices, cuts: Cuts, spread: Spread, rows: int, mean: float, policies: tuple[str, ...]
    ) -> None:
        self.cuts, self._prices, self._spread, self.policies = cuts, prices, spread, policies
        self._rows, self._mean, self.compiled = rows, mean, prices.compiled
        self.ranks, self.stages, self.speeds = spread.stages, len(cuts.pieces), prices.speeds(spread, mean)
        self._again, self._freed = cache(self._repeated), cache(self._not_kept)  # most stages are alike

    @cached_property
    def works(self) -> list[Work]:
        """What each stage takes: who asks for memory alone never needs it."""
        distinct = {stage: self._work(stage) for stage in dict.fromkeys(self.cuts.pieces)}
        return [distinct[stage] for stage in self.cuts.pieces]

    @cached_property
    def front(self) -> Callable[[int, tuple[int, ...], bool], Front]:
        return cache(self._front)

    @cached_property
    def kinds(self) -> Callable[[int, tuple[int, ...]], tuple[Kind, ...]]:
        return cache(self._kinds)

    @cached_property
    def dearness(self) -> Callable[[int, tuple[int, ...]], float]:
        return cache(self._dearness)

    def _work(self, pieces: tuple[tuple[int, int], ...]) -> Work:
        forward = backward = halving = sent_forward = sent_backward = 0.0
        sent: dict[str, float] = {}
        device = self._prices.slowest
        python = device.on_host * python_of(device)
        for place, number in pieces:
            size = self._prices.sizes(place, self._spread)
            halving += number * python * (HALVED * size.calls + HALVED_TENSOR * size.tensors)
            spent = self._prices.spent(place, self._spread, self._mean)
            forward += number * spent.forward
            backward += number * spent.backward
            sent_forward += number * sum(seconds for _, seconds in spent.sent_forward)
            sent_backward += number * sum(seconds for _, seconds in spent.sent_backward)
            for what, seconds in (*spent.sent_forward, *spent.sent_backward):
                sent[what] = sent.get(what, 0.0) + number * seconds
        return Work(forward, backward, halving, sent_forward, sent_backward, sent)

    def _front(self, rank: int, flying: tuple[int, ...], spared: bool) -> Front:
        """What may be done with the blocks of a rank of which so many microbatches of each stage are under way.
        `spared`: the last block of each stage is not computed again."""
        kinds = self.kinds(rank, flying)
        left = tuple(map(Kind.without, kinds, self._spared(rank))) if spared else kinds
        return front(left, len(self.policies))

    def _spared(self, rank: int) -> list[bool]:
        """For each kind of blocks of a rank whether the last block of its stage is one of them."""
        found = []
        for blocks in (self.cuts.blocks[stage] for stage in self.cuts.ranks[rank]):
            last = max((numbers[-1] for _, numbers in blocks), default=-1)
            found += [numbers[-1] == last for _, numbers in blocks]
        return found

    def _dearness(self, rank: int, flying: tuple[int, ...]) -> float:
        """Seconds of a microbatch that a rank computes again at least for a byte that it frees; 0 where nothing
        frees any."""
        kinds = self.kinds(rank, flying)
        ways = [pair for kind in kinds for pair in zip(kind.costs, kind.frees, strict=True)]
        return min((cost / free for cost, free in ways if free > 0), default=0.0)

    def _kinds(self, rank: int, flying: tuple[int, ...]) -> tuple[Kind, ...]:
        kinds = []
        for stage, number in zip(self.cuts.ranks[rank], flying, strict=True):
            for place, numbers in self.cuts.blocks[stage]:
                again = self._prices.again(place, self._spread, self._mean)
                size = self._prices.sizes(place, self._spread)
                ways = (again[policy] for policy in self.policies)
                costs = [each / self.speeds[rank] + sum(seconds for _, seconds in sent) for each, sent in ways]
                frees = [number * self._rows * size.frees(policy) for policy in self.policies]
                kinds.append(Kind(len(numbers), tuple(frees), tuple(costs)))
        return tuple(kinds)

    def split(self, rank: int, counts: Counts) -> list[Counts]:
        """The counts of a rank's blocks, stage by stage, with all blocks that were spared among the first way."""
        found, at = [], 0
        for stage in self.cuts.ranks[rank]:
            own = []
            for _, numbers in self.cuts.blocks[stage]:
                first, *rest = counts[at]
                own.append((first + len(numbers) - sum(counts[at]), *rest))
                at += 1
            found.append(tuple(own))
        return found

    def again(self, stage: int, counts: Counts) -> tuple[float, dict[str, float]]:
        """Seconds that backward of a stage computes again, on the slowest device, and that it sends again."""
        return self._again(self.cuts.places[stage], counts)

    def _repeated(self, places: tuple[int, ...], counts: Counts) -> tuple[float, dict[str, float]]:
        seconds, sends = 0.0, dict[str, float]()
        for place, numbers in zip(places, counts, strict=True):
            again = self._prices.again(place, self._spread, self._mean)
            for policy, number in zip(self.policies, numbers, strict=True):
                own, sent = again[policy]
                seconds += number * own
                for what, each in sent if number else ():
                    sends[what] = sends.get(what, 0.0) + number * each
        return seconds, sends

    def freed(self, stage: int, counts: Counts) -> float:
        """Bytes of a row that backward of a stage does not keep."""
        return self._freed(self.cuts.places[stage], counts)

    def _not_kept(self, places: tuple[int, ...], counts: Counts) -> float:
        return sum(
            number * self._prices.sizes(place, self._spread).frees(policy)
            for place, numbers in zip(places, counts, strict=True)
            for policy, number in zip(self.policies, numbers, strict=True)
        )

    def kept(self, rank: int, flying: Sequence[int], counts: Sequence[Counts]) -> tuple[float, bool]:
        """Bytes of a row that wait for a backward on a rank, and whether it computes a block again as a whole.
        `flying`: microbatches of each of its stages that are under way."""
        places = self.cuts.ranks[rank]
        saved = (self.cuts.sizes[place].saved["none"] - self.freed(place, counts[place]) for place in places)
        kept = math.fsum(number * nbytes for nbytes, number in zip(saved, flying, strict=True))
        return kept, any(self.holds_a_block(place, counts[place]) for place in places)

    def holds_a_block(self, stage: int, counts: Counts) -> bool:
        """Whether backward has a block of a stage whole while all before it still keep what they keep: where the last
        one is computed again."""
        blocks = self.cuts.blocks[stage]
        if not blocks or "none" not in self.policies:
            return bool(blocks)
        kind = max(range(len(blocks)), key=lambda kind: blocks[kind][1][-1])
        return not counts[kind][self.policies.index("none")]

    def none(self) -> list[Counts]:
        """Counts of all stages where every block is treated in the first way."""
        return self.all_by(self.policies[0])

    def recomputes(self, counts: Sequence[Counts]) -> bool:
        """Whether a block is computed again."""
        first = 1 if self.policies[0] == "none" else 0
        if first and all(map(is_, counts, self.cuts.all_by(self.policies, "none"))):
            return False
        return any(any(each[first:]) for own in counts for each in own)

    def all_by(self, policy: str) -> list[Counts]:
        """Counts of all stages where every block is treated so."""
        return list(self.cuts.all_by(self.policies, policy))

    def over_budget(self, keep: float) -> list[int]:
        """The numbers of the blocks that ranks compute again, each to keep this part of its bytes."""
        found = []
        for rank in range(self.ranks):
            kinds = [kind for stage in self.cuts.ranks[rank] for kind in self.cuts.blocks[stage]]
            own = sorted((number, place) for place, numbers in kinds for number in numbers)
            sizes = [self._prices.sizes(place, self._spread) for _, place in own]
            again = over_budget([(each.again, each.frees("full")) for each in sizes], keep)
            found += [own[at][0] for at in again]
        return found

    def places(self, policy: str, counts: Sequence[Counts]) -> list[int]:
        """The numbers, among all blocks of the model, of those that are treated so. The deepest of a stage are kept as
        they are, since they come back first."""
        if policy not in self.policies:
            return []
        order = [each for each in reversed(POLICIES) if each in self.policies]
        before = [self.policies.index(other) for other in order[: order.index(policy)]]
        found: list[int] = []
        for blocks, own in zip(self.cuts.blocks, counts, strict=True):
            for (_, numbers), each in zip(blocks, own, strict=True):
                start = sum(each[other] for other in before)
                found += numbers[start : start + each[self.policies.index(policy)]]
        return sorted(found)


BUSY = ("compute", "parts", "tokens", "experts")
"""Terms of what a rank does between messages of other stages."""


def by_policy(policies: tuple[str, ...], counts: Counts) -> dict[str, int]:
    """How many blocks of a stage are treated in each way."""
    found = {policy: sum(each[place] for each in counts) for place, policy in enumerate(policies)}
    return {policy: number for policy, number in found.items() if number}


def seconds_of(
    lane: Lane, speeds: Sequence[float], again: dict[int, tuple[float, dict[str, float]]], halves: Sequence[float]
) -> list[Pace]:
    """What all stages take where the ranks of the pipeline have devices of these speeds. `halves`: the share of each
    one's backwards that run in halves."""
    found, of_stages = [], {stage: speed for own, speed in zip(lane.cuts.ranks, speeds, strict=True) for stage in own}
    for place, (work, share) in enumerate(zip(lane.works, halves, strict=True)):
        speed, (more, sent) = of_stages[place], again.get(place, (0.0, {}))
        more = more / speed + sum(sent.values())
        backward = (work.backward + share * work.halving) / speed + work.sent_backward + (1 + share) * more
        found.append(Pace(work.forward / speed + work.sent_forward, backward, more, share))
    return found


def fill_of(choice: Choice, lane: Lane, stages: Sequence[Pace], number: int) -> float:
    """Seconds in which the ranks of a pipeline wait with so many microbatches, by a closed form."""
    if (choice.schedule, choice.chunks) == ("1f1b", 1) or lane.ranks == 1:
        return longer_by(stages, number) if lane.ranks > 1 else 0.0
    slow, _ = slowest(stages, lane.cuts.ranks)
    others = [each for place, each in enumerate(stages) if place not in lane.cuts.ranks[slow]]
    forward, backward = (sum(each[way] for each in others) for way in (0, 1))
    return fill(choice.schedule, lane.ranks, number, choice.chunks, forward, backward)


def at_least(
    choice: Choice, lane: Lane, stages: Sequence[Pace], number: int, crowd: Crowd, sends: float
) -> tuple[float, float]:
    """Seconds that a rank works and waits for others at least in a step of `number` microbatches whose stages take as
    long or longer backward, and those that it waits for messages, which take `sends` where nothing else is done
    meanwhile. Where backwards run in halves it waits for forwards of the others, whichever rank is the slowest."""
    each = of_ranks(stages, lane.cuts.ranks)
    busy = number * max(each)
    if lane.ranks == 1:
        return busy, 0.0
    if choice.schedule in IN_HALVES:
        forwards = [sum(stages[stage].forward for stage in own) for own in lane.cuts.ranks]
        others = (sum(forwards) - max(forwards)) / choice.chunks
    else:
        others = fill_of(choice, lane, stages, number)
    bubble, messages = waits(others, sends, busy, crowd, number * shared(each, crowd))
    return busy + bubble, messages


def within(terms: Mapping[str, float], seconds: float, crowd: Crowd) -> dict[str, float]:
    """The terms of a pipeline whose schedule takes so many seconds: what a rank does not work, or send to other stages,
    it waits. Where stages share cores, those that wait leave theirs to others: then what waits for messages is in
    those seconds, and where the ones that end early help the one that works longest, its own terms take less."""
    busy = math.fsum(terms.get(what, 0.0) for what in BUSY)
    faster = min(1.0, seconds / busy) if busy else 1.0
    own = {what: value * (faster if what in BUSY else 1.0) for what, value in terms.items()}
    if crowd.most > 1:
        own["stages"] = min(own["stages"], max(0.0, seconds - busy))
    return {**own, "bubble": max(0.0, seconds - busy - own["stages"])}
