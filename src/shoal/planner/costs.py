"""Closed forms for what a choice takes: seconds of its terms, and bytes that travel. One `Prices` for each task; what
depends on the degrees alone is computed once for each. What a device computes is in `computing`; collectives take
alpha-beta times over rings (`Link.seconds`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

from shoal.planner.cluster import Device, Link
from shoal.planner.computing import (
    AS_COUNTED,
    BACKWARD,
    FORWARD,
    UNADDED,
    Longer,
    Times,
    counted_again,
    python_of,
    python_once,
    seconds_of,
    there_and_back,
)
from shoal.planner.degrees import Spread
from shoal.planner.pieces import grouped, kind, sent
from shoal.planner.probed import ByRows
from shoal.planner.profile import Message, PartProfile
from shoal.planner.selected import results_kept, saved_names
from shoal.planner.sizes import Sizes
from shoal.planner.task import Task

COMPILING = 30.0
"""Seconds until a compiled block of a kind is compiled, there and back. Assumed."""
REDUCED_AT_ONCE = 0.05
"""The share of an exchange that comes after the last backward, whatever overlaps: the last chunk, of many."""

MET = {"": 5, "experts": 16}
"""Launches that Python takes of a host's cores for each call in a forward or backward, by what ranks divide: autograd's
function around it, the books of the group, and what deals tokens out, 12 with that; then cores are idle for a fifth of
a millisecond, about 4 launches, as experts have unequal numbers of tokens. Measured, on a GPT and a Mixtral."""
SELECTED = 50
"""And for each in a block where torch asks of every operation, and of those that the call itself makes, whether to
keep what it gives. Measured on the same, cut by matrices, tokens and both."""

Pairs = tuple[tuple[str, float], ...]
"""Seconds, or bytes, by what ranks divide."""


@dataclass(frozen=True)
class Spent:
    """Seconds of one microbatch of a piece: `forward` and `backward` of computing, and of communication by what its
    ranks divide, in each direction."""

    forward: float
    backward: float
    sent_forward: Pairs
    sent_backward: Pairs


class Prices:
    """What the pieces of a task's model take and hold, with blocks as they are written, or `compiled`. `known`: prices
    of a task that differs in memory and in links alone, from which the rest is taken."""

    def __init__(self, task: Task, compiled: bool = False, known: Prices | None = None) -> None:
        self.task, self._cluster, self.compiled = task, task.cluster, compiled
        self._known, self._spent, self._again = known, cache(self._spend), cache(self._repeat)
        self.alike, self.blocks = cache(self._alike), cache(self._blocks_of)
        self.is_known = cache(self._has_same_links)
        if known is None:
            self._computed, self._recomputed = cache(self._compute), cache(self._recompute)
            self._sizes, self._of_hosts = cache(self._measure), cache(self._compared)
        else:
            self._computed, self._recomputed = known._computed, known._recomputed
            self._sizes, self._of_hosts = known._sizes, known._of_hosts

    @cached_property
    def pieces(self) -> list[list[PartProfile]]:
        """The parts of the model in the pieces that stages consist of."""
        return grouped(self.task.profile.parts)

    @cached_property
    def has_experts(self) -> bool:
        """Whether parts have stacked experts that are trained."""
        return any(part.experts.value for part in self.task.profile.parts)

    @cached_property
    def side(self) -> float:
        """Side of a block's matrices, in elements, were they squares of one size; 1 where there are no blocks."""
        blocks = (part for part in self.task.profile.parts if part.is_block)
        return math.sqrt(max([1.0, *(part.weights.value / max(1, part.multiplied) for part in blocks)]))

    def _alike(self, places: range) -> tuple[tuple[int, int], ...]:
        """The distinct pieces among `places`, in order, and how many are like each."""
        counts: dict[int, int] = {}
        for place in places:
            counts[self.like[place]] = counts.get(self.like[place], 0) + 1
        return tuple(counts.items())

    def _blocks_of(self, places: range) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The distinct blocks among the pieces at `places`, each with the first piece that has it, and the numbers,
        among all blocks of the model, of those that are like it."""
        found: dict[tuple[str, ...], tuple[int, list[int]]] = {}
        for place in places:
            kind, number = self._blocks[place]
            if kind:
                found.setdefault(kind, (self.like[place], []))[1].append(number)
        return tuple((place, tuple(numbers)) for place, numbers in found.values())

    @cached_property
    def _blocks(self) -> list[tuple[tuple[str, ...], int]]:
        """For each piece the kind of its block, and its number; where it has none, nothing."""
        kinds = [tuple(part.kind for part in piece if part.is_block) for piece in self.pieces]
        return list(zip(kinds, accumulate(map(bool, kinds[:-1]), initial=0), strict=True))

    @cached_property
    def like(self) -> list[int]:
        """For each piece the first one that is like it."""
        first: dict[tuple[str, ...], int] = {}
        return [first.setdefault(tuple(part.kind for part in piece), place) for place, piece in enumerate(self.pieces)]

    def spent(self, place: int, spread: Spread, rows: float) -> Spent:
        """Seconds of a microbatch of `rows` rows of a piece."""
        if self._known is not None and self.is_known(spread):
            return self._known.spent(place, spread, rows)
        return self._spent(self.like[place], spread.inside, rows)

    def again(self, place: int, spread: Spread, rows: float) -> dict[str, tuple[float, Pairs]]:
        """Returns the seconds of what backward computes again of the blocks of a piece, by recompute policy, and what
        that sends."""
        if self._known is not None and self.is_known(spread):
            return self._known.again(place, spread, rows)
        return self._again(self.like[place], spread.inside, rows)

    def sizes(self, place: int, spread: Spread) -> Sizes:
        """What a rank holds of a piece."""
        return self._sizes(self.like[place], spread.inside)

    @cached_property
    def slowest(self) -> Device:
        """The device that others wait for: the one that takes longest alone for its share of the rows of a step."""
        rows = self.task.microbatch or max(1, self.task.rows // self._cluster.size)
        return max(self._cluster.devices, key=lambda device: self._alone(device, Spread(), rows, False))

    def _alone(self, device: Device, spread: Spread, rows: float, compiled: bool) -> float:
        """Seconds that a device takes for so many rows of all of the model."""
        how = spread, rows, device, self.task.numbers, compiled
        alike = self.alike(range(len(self.pieces)))
        return math.fsum(number * there_and_back(self.pieces[place], *how) for place, number in alike)

    @cached_property
    def _probed(self) -> ByRows:
        return ByRows(self.task, self.slowest)

    def speeds_of_hosts(self, spread: Spread, rows: float) -> list[float]:
        """How fast the devices of each host are with microbatches of so many rows, relative to `slowest`."""
        return self._of_hosts(spread.inside, rows)

    def _compared(self, spread: Spread, rows: float) -> list[float]:
        devices, hosts = self._cluster.devices, self._cluster.hosts
        if len(devices) == 1:
            return [1.0] * len(hosts)
        alone = [self._alone(each, spread, rows, self.compiled) for each in devices]
        slow = alone[devices.index(self.slowest)]
        return [slow / alone[devices.index(host.device)] for host in hosts]

    def speeds(self, spread: Spread, rows: float) -> list[float]:
        """How fast the slowest device of each rank of a pipeline is with microbatches of so many rows."""
        if len(self._cluster.devices) == 1:
            return [1.0] * spread.stages
        count, of_host, each = self._cluster.per_host, self.speeds_of_hosts(spread, rows), spread.size // spread.stages
        firsts = range(0, spread.size, each)
        return [min(of_host[first // count : (first + each - 1) // count + 1]) for first in firsts]

    def _compute(self, place: int, spread: Spread, rows: float) -> tuple[float, float]:
        """Seconds of computing of a piece, forward and backward."""
        own = self.pieces[place]

        def seconds(times: Times, longer: Longer = AS_COUNTED) -> float:
            how = times, self.slowest, self.task.numbers
            compiled = ((each, self.compiled and each.is_block) for each in own)
            return math.fsum(seconds_of(each, spread, rows, *how, built, longer) for each, built in compiled)

        there, back, *_ = self._probed.of(own, spread, rows)
        backward = seconds(BACKWARD) + (seconds(UNADDED, back) - seconds(UNADDED) if back != AS_COUNTED else 0.0)
        return seconds(FORWARD, there), self.slowest.backward * backward

    def _recompute(self, place: int, spread: Spread, rows: float) -> tuple[float, float]:
        """Seconds of computing the blocks of a piece again, some and all of them."""
        blocks = [part for part in self.pieces[place] if part.is_block]
        how = self.slowest, self.task.numbers, self.compiled, saved_names(self.task.pins)
        counted = counted_again(blocks, spread, rows, *how)
        _, _, some, full = self._probed.of(self.pieces[place], spread, rows)
        return some * counted[0], full * counted[1]

    def _spend(self, place: int, spread: Spread, rows: float) -> Spent:
        own, (forward, backward) = self.pieces[place], self._computed(place, spread, rows)
        sent = self._carried(own, spread, rows)
        there = _summed((kind(message), seconds) for message, seconds in sent)
        back = _summed((kind(message), seconds * message.again) for message, seconds in sent)
        forward += self._called(own, spread, rows, lambda message: 1.0)
        return Spent(forward, backward + self._called(own, spread, rows, lambda message: message.again), there, back)

    def _repeat(self, place: int, spread: Spread, rows: float) -> dict[str, tuple[float, Pairs]]:
        some, full = self._recomputed(place, spread, rows)
        blocks = [part for part in self.pieces[place] if part.is_block]
        sent = self._carried(blocks, spread, rows)
        carried = _summed((kind(message), seconds * message.repeated) for message, seconds in sent)
        called = self._called(blocks, spread, rows, lambda message: message.repeated)
        calls = math.fsum(number * (1 + message.repeated) for message, number in self._calls(blocks, spread, rows))
        some, full = some + called + SELECTED * calls * python_of(self.slowest), full + called
        return {"none": (0.0, ()), "selective": (some, carried), "full": (full, carried)}

    def _carried(self, parts: Sequence[PartProfile], spread: Spread, rows: float) -> list[tuple[Message, float]]:
        """The messages of a forward that take time, and how much."""
        messages = (message for part in parts for message in part.messages)
        return [(each, seconds) for each in messages if (seconds := self.carried(each, spread, rows))]

    def carried(self, message: Message, spread: Spread, rows: float) -> float:
        """Seconds of a message in forward; 0 where no ranks divide that."""
        ranks, calls, payload = sent(message, spread, rows)
        if ranks == 1:
            return 0.0
        link = self._cluster.link(spread.stride(kind(message)), ranks, message.operation)
        return link.seconds(message.operation, payload, ranks, calls)

    def _called(
        self, parts: Sequence[PartProfile], spread: Spread, rows: float, times: Callable[[Message], float]
    ) -> float:
        """Seconds of Python for the calls of `parts`, each message so many `times`."""
        every = self._calls(parts, spread, rows)
        launches = math.fsum(MET.get(kind(each), MET[""]) * number * times(each) for each, number in every)
        return launches * python_once(self.slowest)

    def _calls(self, parts: Sequence[PartProfile], spread: Spread, rows: float) -> list[tuple[Message, float]]:
        """The messages of a forward that Python of a host's cores sends, and how many calls each is."""
        every = ((each, *sent(each, spread, rows)) for part in parts for each in part.messages)
        return [(each, calls) for each, ranks, calls, _ in every if ranks > 1 and self.slowest.on_host]

    def _has_same_links(self, spread: Spread) -> bool:
        """Whether stages of these degrees send over the same links as in the task that is known."""
        return self._known is not None and self._links(spread) == self._known._links(spread)

    def _links(self, spread: Spread) -> list[Link]:
        """The links over which stages of these degrees send, in themselves and to each other."""
        ways = [(what, getattr(spread, what), operation) for what, operation in self._sent]
        ways.append(("stages", spread.stages, "send"))
        return [self._cluster.link(spread.stride(what), ranks, how) for what, ranks, how in ways if ranks > 1]

    @cached_property
    def _sent(self) -> list[tuple[str, str]]:
        """The kinds of collectives of the model: what their ranks divide, and the operation."""
        messages = (each for part in self.task.profile.parts for each in part.messages)
        return list(dict.fromkeys((kind(each), each.operation) for each in messages))

    def wire(self, place: int, spread: Spread, rows: float, again: bool = False) -> dict[str, float]:
        """Bytes of tensors that a microbatch of a piece hands to collectives, forward and backward, or, `again`, where
        its blocks are computed again."""
        found: dict[str, float] = {}
        for message in (each for part in self.pieces[place] if part.is_block or not again for each in part.messages):
            ranks, _, payload = sent(message, spread, rows)
            if ranks > 1:
                share = message.repeated if again else 1 + message.again
                found[kind(message)] = found.get(kind(message), 0.0) + payload * share
        return found

    def _measure(self, place: int, spread: Spread) -> Sizes:
        own = self.pieces[place]
        saved = math.fsum(part.saved.on(spread) for part in own)
        others = math.fsum(part.saved.on(spread) for part in own if not part.is_block)
        given = math.fsum(part.boundary.on(spread) for part in own if part.is_block)
        results = results_kept(own, spread, saved_names(self.task.pins))
        return Sizes(
            math.fsum(part.weights.on(spread) for part in own),
            math.fsum(part.trained.on(spread) for part in own),
            math.fsum(part.experts.on(spread) * _inside(part, spread) for part in own) * (spread.experts > 1),
            {"none": saved, "full": others + given, "selective": min(saved, others + given + results)},
            own[0].boundary.on(spread) if own[0].boundary.value else given,
            saved,
            saved - others,
            max(part.weights.on(spread) for part in own),
            max(part.largest.on(spread) for part in own),
            math.fsum(part.calls.on(spread) for part in own),
            sum(part.tensors for part in own),
        )


def _inside(part: PartProfile, spread: Spread) -> float:
    """The share of an expert that a rank of those that divide matrices has."""
    return part.weights.on(spread) / part.weights.on(Spread(experts=spread.experts)) if part.weights.value else 1.0


def _summed(pairs: Iterable[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    sums: dict[str, float] = {}
    for what, seconds in pairs:
        sums[what] = sums.get(what, 0.0) + seconds
    return tuple(sums.items())
