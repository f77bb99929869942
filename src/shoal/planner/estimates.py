"""What a choice takes and holds, by closed forms; where its memory is short, which blocks are computed again, stage by
stage, in the least time (see knapsack). What is chosen is timed by its schedule's own list of actions (`simulated`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shoal.module.chosen_blocks import as_ranges
from shoal.plan import Option
from shoal.planner.degrees import Spread
from shoal.planner.exchanges import exchanged, exposed, met, moved, updated
from shoal.planner.held import Held, held
from shoal.planner.knapsack import Counts
from shoal.planner.lanes import Lane, by_policy, within
from shoal.planner.once import once_in_as_much_memory
from shoal.planner.pipes import Pace, passed_on, simulated, slowest
from shoal.planner.recomputed import Recomputed
from shoal.planner.replicas import Dealt
from shoal.planner.task import Choice, Estimate


class Begun(NamedTuple):
    """What is known of a choice whose stages treat their blocks as `counts` say, before it is priced: the `terms` that
    do not depend on what copies of the model share; the deal, the seconds of all stages, the rank of the pipeline that
    others wait for, and what the rank holds whose device is fullest."""

    choice: Choice
    counts: list[Counts]
    lane: Lane
    terms: dict[str, float]
    deal: Dealt
    stages: tuple[Pace, ...]
    slow: int
    fullest: Held


class Beside(NamedTuple):
    """Seconds that a rank's step takes longer than computing and waiting for stages: by what `copies` of the model
    share, by what moves, and by the update; the bytes that it sends, and the seconds of what is `moving` (see
    Estimate)."""

    copies: float
    offload: float
    optimizer: float
    wire: dict[str, float]
    moving: float

    @property
    def seconds(self) -> float:
        return self.copies + self.offload + self.optimizer


class Estimates(Recomputed):
    """The prices of a task's choices. `known`: as of Timed; where ranks may use as much, what choices hold is taken
    from there too."""

    def estimate(self, choice: Choice) -> Estimate:
        """What `choice` takes and holds where each stage computes again what it must, in the least time; as pinned,
        where that is. What travels is left out (see `simulated`)."""
        return self.finished(self.looked(choice))

    def freer(self, begun: Begun) -> Iterator[Begun]:
        """Yields the same choice where stages compute again more than they must, by more and more: what is at home on
        the host may stay on the device then, which moves less, and takes less of the host. Nothing where a pin, or the
        choice, says what is computed again."""
        for counts in self.more(begun.choice, begun.lane, begun.deal.most, begun.counts):
            yield self.begun(begun.choice, counts)

    def freest(self, begun: Begun) -> Begun:
        """The last of `freer`, or `begun` where there is none."""
        most = self.all_that_may(begun.choice, begun.lane, begun.deal.most)
        return begun if most is None else self.begun(begun.choice, most)

    def floor(self, choice: Choice) -> tuple[float, bool]:
        """Seconds that no estimate of `choice` is below, whatever of its blocks is computed again, and whether
        something has to be. 0 where replicas differ in speed, or a pin says what is computed again."""
        return self._floor(choice.spread, choice)

    @once_in_as_much_memory
    def _floor(self, spread: Spread, choice: Choice) -> tuple[float, bool]:
        lane = self.lane(choice)
        if (
            len(lane.policies) == 1
            or "recompute" in self.task.pins
            or len(self.replicas(spread, choice.microbatch, choice.compile).speeds) > 1
        ):
            return 0.0, True
        terms, deal, stages, _ = self._in_lane(choice, lane, lane.none(), self._meets(choice))
        needs = list(self._needs(choice, lane, deal.most))
        if not needs:
            return math.fsum(terms.values()), False
        longer = list(stages)
        for rank, need in needs:
            least = need * lane.dearness(rank, self._flying(choice, rank, deal.most))
            often = 1 + min(stages[stage].parted for stage in lane.cuts.ranks[rank])
            longer[rank] = longer[rank]._replace(backward=longer[rank].backward + often * least)
        return self._at_least(choice, lane, longer, deal.number, terms), True

    def priced(self, choice: Choice, counts: list[Counts]) -> Estimate:
        """What `choice` takes and holds where the stages treat their blocks so."""
        return self.finished(self.begun(choice, counts))

    def holds(self, choice: Choice) -> Held:
        """What the rank holds whose device is fullest. Where replicas are alike it is known without any seconds."""
        lane, counts = self.lane(choice), self.counts(choice)
        if self._have_as_many(choice):
            most = math.ceil(math.ceil(self.task.rows / choice.microbatch) / choice.spread.copies)
        else:
            most = self.deal(choice, lane, counts).most
        return self._fullest(choice, lane, counts, most)

    def timed(self, choice: Choice) -> float:
        """Seconds of a choice but for what copies of the model share, where each stage computes again what it must."""
        return self._seconds(choice.spread, choice)

    @once_in_as_much_memory
    def _seconds(self, spread: Spread, choice: Choice) -> float:
        return math.fsum(self._in_lane(choice, self.lane(choice), self.counts(choice), self._meets(choice))[0].values())

    def looked(self, choice: Choice) -> Begun:
        """What says of `choice` whether it fits where each stage computes again what it must, in the least time."""
        return self._begun(choice.spread, choice)

    @once_in_as_much_memory
    def _begun(self, spread: Spread, choice: Choice) -> Begun:
        return self.begun(choice, self.counts(choice))

    def begun(self, choice: Choice, counts: list[Counts]) -> Begun:
        """Finds of `choice` what says whether it fits, and which seconds it is not below."""
        lane = self.lane(choice)
        terms, deal, stages, slow = self._in_lane(choice, lane, counts, self._meets(choice))
        return Begun(choice, counts, lane, terms, deal, stages, slow, self._fullest(choice, lane, counts, deal.most))

    def finished(self, begun: Begun) -> Estimate:
        """What a choice takes and holds."""
        choice, counts, lane, deal, fullest = begun.choice, begun.counts, begun.lane, begun.deal, begun.fullest
        stages, slow, number = begun.stages, begun.slow, deal.number
        ranks, terms = choice.spread.stages, dict(begun.terms)
        own = self.beside(begun, slow)
        last, wire = self._last(begun, own), dict(own.wire)
        terms |= {"copies": last.copies, "offload": last.offload, "optimizer": last.optimizer}
        for place in lane.cuts.ranks[slow] if lane.recomputes(counts) else ():
            _add(wire, self._sent_again(choice, lane, place, counts[place]), number * (1 + stages[place].parted))
        if ranks > 1:
            terms["stages"] += met(self.prices, choice)[0]
        chosen = choice._replace(
            stages=lane.cuts.numbers if ranks > 1 else (),
            recompute=self._option(lane, counts),
            shares=deal.shares,
        )
        again = tuple(by_policy(lane.policies, each) for each in counts)
        forward, backward = (number * each for each in _computed(lane, stages, slow))
        device, host, disk = fullest.device, fullest.host, fullest.disk
        return Estimate(
            chosen, terms, device, host, disk, wire, number, again, stages,
            forward=forward, backward=backward, moving=last.moving, fullest=fullest.rank,
        )  # fmt: skip

    def _last(self, begun: Begun, found: Beside) -> Beside:
        """What the rank of a pipeline that ends last does beside computing: the one that others wait for (`found`), or
        one with more weights, which has their exchange and update before it when its last backward has ended; that of
        a later stage ends as much before that of the first one as those between take."""
        lane, trained = begun.lane, self._own(begun.choice.spread, begun.lane.cuts, begun.slow).trained
        for rank, *_ in lane.cuts.alike:
            if self._own(begun.choice.spread, lane.cuts, rank).trained > trained:
                other, early = self.beside(begun, rank), sum(each.backward for each in begun.stages[:rank])
                other = other._replace(copies=max(0.0, other.copies - early))
                found = max(found, other, key=lambda each: each.seconds)
        return found

    def beside(self, begun: Begun, rank: int) -> Beside:
        """What a rank of a pipeline does beside computing and waiting for other stages."""
        choice, counts, lane, stages, number = begun.choice, begun.counts, begun.lane, begun.stages, begun.deal.number
        places, own, tied = lane.cuts.ranks, self._own(choice.spread, lane.cuts, rank), self.tied(choice.spread)
        crowd = self.crowd(choice.spread)
        alone = crowd.speed(1 / crowd.stages)  # the last to compute
        window = sum(stages[stage].backward for stage in places[rank]) / alone, number * slowest(stages, places)[1]
        has = self._held(choice, lane, rank, counts, begun.deal.most)
        sends, wire = exchanged(self.prices, choice, own, number, window, tied, has)
        one = self._kept(choice, lane, rank, [1] * choice.chunks, counts)[0]
        moving, apart = moved(self.prices, choice, own, number, tied, has, one)
        there = window[1] + math.fsum(begun.terms.get(what, 0.0) for what in ("bubble", "stages")) + sends
        offload = exposed(self.prices, moving, there) + apart
        return Beside(sends, offload, updated(self.prices, choice, own, tied, has), wire, moving)

    def _sent_again(self, choice: Choice, lane: Lane, stage: int, counts: Counts) -> dict[str, float]:
        """Bytes that backward of a microbatch sends again, by what ranks divide."""
        found, rows = dict[str, float](), self.mean(choice.spread, choice.microbatch)
        for (place, _), numbers in zip(lane.cuts.blocks[stage], counts, strict=True):
            often = sum(each for policy, each in zip(lane.policies, numbers, strict=True) if policy != "none")
            _add(found, self.prices.wire(place, choice.spread, rows, again=True), often)
        return found

    def _fullest(self, choice: Choice, lane: Lane, counts: list[Counts], most: int) -> Held:
        """What the rank holds whose device is fullest; and of the host and the disk what the one needs that needs most
        of them, which may be another one: where devices are filled to the budget, all are as full. Cores and their host
        have one memory, of which what is in both counts."""
        ranks = self._ranks(choice, lane, counts, most)
        if self.prices.slowest.on_host:
            return max(ranks, key=lambda each: each.bytes + each.host)
        found = max(ranks, key=lambda each: each.bytes)
        host, disk = (max(ways) for ways in zip(*((each.host, each.disk) for each in ranks), strict=True))
        return found if found.host == host and found.disk == disk else found._replace(host=host, disk=disk)

    def each(self, choice: Choice) -> list[Held]:
        """What the ranks of a pipeline hold, of those that are alike one."""
        lane, counts = self.lane(choice), self.counts(choice)
        return self._ranks(choice, lane, counts, self.deal(choice, lane, counts).most)

    def _ranks(self, choice: Choice, lane: Lane, counts: list[Counts], most: int) -> list[Held]:
        """What ranks hold: of those that are alike, also in what they compute again, the one with most under way."""
        plain, alike = self._plain(choice, lane, most), dict[object, list[int]]()
        again = lane.recomputes(counts)
        alone = again and choice.chunks > 1  # what frees much may be what few are under way of
        for number, ranks in enumerate(lane.cuts.alike):
            for rank in ranks:
                own = [counts[stage] for stage in lane.cuts.ranks[rank]] if again else ()
                alike.setdefault((number, alone and rank, *own), []).append(rank)
        fullest = (max(ranks, key=plain.__getitem__) for ranks in alike.values())
        return [self._held(choice, lane, rank, counts, most) for rank in fullest]

    def _held(self, choice: Choice, lane: Lane, rank: int, counts: list[Counts], most: int) -> Held:
        """What a rank holds which has up to `most` microbatches."""
        if lane.recomputes(counts):
            kept, whole = self._kept(choice, lane, rank, self._flying(choice, rank, most), counts)
        else:
            kept, whole = self._plain(choice, lane, most)[rank], 0.0
        stays = choice.on_device
        device = {**self._stands(choice, lane, rank).by_role, "activations": stays * kept + whole}
        own = self._own(choice.spread, lane.cuts, rank)
        found = held(self.prices, choice, own, self.tied(choice.spread), device, (1 - stays) * kept)
        return found._replace(rank=rank)

    def _option(self, lane: Lane, counts: list[Counts]) -> Option:
        """The plan's `recompute`."""
        if (given := self.task.pins.get("recompute")) is not None:
            return given if isinstance(given, str) else dict(given)
        if len(lane.policies) == 1 or not lane.recomputes(counts):
            return lane.policies[0]
        places = {policy: lane.places(policy, counts) for policy in ("full", "selective")}
        number = sum(len(numbers) for blocks in lane.cuts.blocks for _, numbers in blocks)
        if not any(places.values()):
            return "none"
        for policy, own in places.items():
            if len(own) == number:
                return policy
        return {"name": "blocks", **{policy: as_ranges(own) for policy, own in places.items() if own}}

    def simulated(self, estimate: Estimate) -> Estimate:
        """The estimate with the bytes that travel, and of a pipeline with the waiting that its schedule's own lists of
        actions have."""
        choice, terms, spread = estimate.choice, dict(estimate.terms), estimate.choice.spread
        forward, backward, compute = estimate.forward, estimate.backward, terms["compute"]
        found, wire, ranks = self.lane(choice).cuts, dict(estimate.wire), spread.stages
        stages, rows = estimate.stages, self.mean(spread, choice.microbatch)
        slow, _ = slowest(stages, found.ranks)
        for place, many in (each for stage in found.ranks[slow] for each in found.pieces[stage]):
            _add(wire, self.prices.wire(place, spread, rows), many * estimate.microbatches)
        if ranks > 1:
            meets, meeting = met(self.prices, choice)
            row = passed_on([each.boundary for each in found.sizes], found.ranks)[slow]
            wire["stages"] = estimate.microbatches * rows * row + meeting
            timed = choice.schedule, ranks, estimate.microbatches, choice.chunks, stages, self.message(choice)
            crowd = self.crowd(spread)
            terms["stages"] -= meets  # which follows the last action
            if crowd.most > 1:  # of all messages the schedule says anew which part is waited for
                terms["stages"] = self.sends(choice, estimate.microbatches)
            seconds = simulated(*timed, crowd)
            terms = within(terms, seconds, crowd)
            terms["stages"] += meets
            if estimate.moving:
                terms["offload"] = exposed(self.prices, estimate.moving, seconds + terms["copies"])
            forward, backward = (each * terms["compute"] / compute for each in (forward, backward))
        message = self.message(choice)
        return replace(estimate, terms=terms, wire=wire, message=message, forward=forward, backward=backward)


def _computed(lane: Lane, stages: Sequence[Pace], slow: int) -> tuple[float, float]:
    """Seconds in which the rank `slow` of a pipeline computes forwards of a microbatch, and backwards but for what they
    compute again and what halves of them take beside."""
    forward = backward = 0.0
    for place in lane.cuts.ranks[slow]:
        work = lane.works[place]
        own = stages[place].forward - work.sent_forward
        forward += own
        backward += own * work.backward / work.forward if work.forward else 0.0  # on a device as fast
    return forward, backward


def _add(sums: dict[str, float], more: Mapping[str, float], times: float) -> None:
    for what, value in more.items():
        sums[what] = sums.get(what, 0.0) + times * value
