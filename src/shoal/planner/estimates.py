"""What a choice takes and holds, by closed forms; where its memory is short, which blocks are computed again, stage by
stage, in the least time (see knapsack). What is chosen is timed by its schedule's own list of actions (`simulated`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.module.chosen_blocks import as_ranges
from shoal.plan import Option, option_name, option_parameters
from shoal.planner.degrees import Spread
from shoal.planner.exchanges import exchanged, exposed, met, moved, updated
from shoal.planner.held import Held, held
from shoal.planner.knapsack import Counts
from shoal.planner.lanes import Lane, by_policy, within
from shoal.planner.once import once_in_as_much_memory
from shoal.planner.pipes import Crowd, Pace, of_ranks, passed_on, simulated, slowest
from shoal.planner.policies import by_place
from shoal.planner.replicas import Dealt
from shoal.planner.task import Choice, Estimate
from shoal.planner.timed import Timed, timing


@dataclass(frozen=True)
class Begun:
    """What is known of a choice whose stages treat their blocks as `counts` say, before it is priced: the `terms` that
    do not depend on what copies of the model share; the deal, the seconds of all stages, and the rank of the pipeline
    that others wait for; and what the `fullest` rank holds."""

    choice: Choice
    counts: list[Counts]
    lane: Lane
    terms: dict[str, float]
    deal: Dealt
    stages: tuple[Pace, ...]
    slow: int
    fullest: Held


APART = ("stages", "data", "other")
"""Terms that do not depend on what is computed again."""


class Estimates(Timed):
    """The prices of a task's choices. `known`: as of Timed; where ranks may use as much, what choices hold is taken
    from there too."""

    def estimate(self, choice: Choice) -> Estimate:
        """What `choice` takes and holds where each stage computes again what it must, in the least time; as pinned,
        where that is. What travels is left out (see `simulated`)."""
        return self.finished(self.looked(choice))

    def most(self, choice: Choice) -> float:
        """Bytes that a rank may use of its device: with a budget of `plan.memory` those."""
        said = None if choice.offload is None or self.prices.slowest.on_host else choice.offload.device
        return self.task.most if said is None else min(self.task.most, said)

    def counts(self, choice: Choice) -> list[Counts]:
        """How each stage treats its blocks: all as `choice` says where it names a way other than "none"; where nothing
        fits, what frees most."""
        lane = self.lane(choice)
        counts = lane.none()
        if choice.recompute != "none" and choice.recompute in lane.policies:
            return lane.all_by(str(choice.recompute))
        if (pinned := self._pinned(lane)) is not None:
            return pinned
        number = self.deal(choice, lane, counts).most
        for rank, need in self._needs(choice, lane, number):
            found = self._cheapest(choice, lane, rank, self._flying(choice, rank, number), need)
            for place, own in zip(range(rank, len(counts), lane.ranks), lane.split(rank, found), strict=True):
                counts[place] = own
        return counts

    def _needs(self, choice: Choice, lane: Lane, number: int) -> Iterator[tuple[int, float]]:
        """Yields the ranks of a pipeline that have to free something, and how many bytes."""
        plain, stays = self._plain(*timing(choice), number), choice.on_device
        for ranks in lane.cuts.alike if stays else ():
            room = self.most(choice) - math.fsum(self._stands(choice, ranks[0]).values())
            for rank in ranks:
                if stays * plain[rank] > room:
                    yield rank, plain[rank] - room / stays

    def floor(self, choice: Choice) -> tuple[float, bool]:
        """Seconds that no estimate of `choice` is below, whatever of its blocks is computed again, and whether
        something has to be. 0 where replicas differ in speed, or a pin says what is computed again."""
        return self._floor(choice.spread, choice)

    @once_in_as_much_memory
    def _floor(self, spread: Spread, choice: Choice) -> tuple[float, bool]:
        lane = self.lane(choice)
        if len(lane.policies) == 1 or "recompute" in self.task.pins or len(self.replicas(spread).speeds) > 1:
            return 0.0, True
        terms, deal, stages, _ = self._in_lane(choice, lane, lane.none(), self._meets(choice))
        needs = list(self._needs(choice, lane, deal.most))
        if not needs:
            return math.fsum(terms.values()), False
        seconds = of_ranks(stages, lane.ranks)
        longest = max(seconds)
        for rank, need in needs:
            least = need * lane.dearness(rank, self._flying(choice, rank, deal.most))
            longest = max(longest, seconds[rank] + least)
        return (1 - 1e-9) * (deal.number * longest + sum(terms.get(what, 0.0) for what in APART)), True

    def _cheapest(self, choice: Choice, lane: Lane, rank: int, flying: tuple[int, ...], need: float) -> Counts:
        """The counts of a rank's blocks that free `need` bytes in the least time; where none do, those that free
        most."""
        whole = self._own(choice.spread, lane.stages, rank).again * choice.microbatch
        best = None
        fronts = [(lane.front(rank, flying, True), need)] if "none" in lane.policies else []
        for front, wanted in (*fronts, (lane.front(rank, flying, False), need + whole)):
            found = front.cheapest(wanted)
            if found is not None and (best is None or found[0] < best[0]):
                best = found[0], front, found[1]
        if best is None:
            front = lane.front(rank, flying, False)
            return front.at(len(front.frees) - 1)
        return best[1].at(best[2])

    def _pinned(self, lane: Lane) -> list[Counts] | None:
        """The counts where the plan's `recompute` is given."""
        given = self.task.pins.get("recompute")
        if len(lane.policies) == 1:
            return lane.none()
        if given is None:
            return None
        ways = self._ways(lane, option_name(given, "recompute"), option_parameters(given))
        return [
            tuple(
                tuple(sum(ways.get(each, "none") == policy for each in numbers) for policy in lane.policies)
                for _, numbers in blocks
            )
            for blocks in lane.cuts.blocks
        ]

    def _ways(self, lane: Lane, name: str, parameters: Mapping[str, Any]) -> dict[int, str]:
        """How blocks are treated, by their numbers, where not all of them are alike."""
        if name == "budget":
            return dict.fromkeys(lane.over_budget(parameters["keep"]), "full")
        number = sum(len(numbers) for blocks in lane.cuts.blocks for _, numbers in blocks)
        return by_place(parameters, number)

    def priced(self, choice: Choice, counts: list[Counts]) -> Estimate:
        """What `choice` takes and holds where the stages treat their blocks so."""
        return self.finished(self.begun(choice, counts))

    def holds(self, choice: Choice) -> Held:
        """What the rank holds whose device is fullest. Where replicas are alike it is known without any seconds."""
        lane, counts, replicas = self.lane(choice), self.counts(choice), self.replicas(choice.spread)
        if len(replicas.speeds) > 1 or self.task.pins.get("shares"):
            most = self.deal(choice, lane, counts).most
        else:
            most = math.ceil(math.ceil(self.task.rows / choice.microbatch) / len(replicas.kinds))
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
        fullest = self._fullest(choice, lane, counts, deal.most)
        return Begun(choice, counts, lane, terms, deal, stages, slow, fullest)

    def finished(self, begun: Begun) -> Estimate:
        """What a choice takes and holds."""
        choice, counts, lane, deal, fullest = begun.choice, begun.counts, begun.lane, begun.deal, begun.fullest
        stages, slow = begun.stages, begun.slow
        spread, ranks, terms = choice.spread, choice.spread.stages, dict(begun.terms)
        own, tied = self._own(spread, lane.stages, slow), self.tied(spread)
        number = deal.number
        alone = Crowd(self.prices.slowest.crowd, self.task.cluster.per_host).speed(1 / ranks)  # the last to compute
        window = sum(each.backward for each in stages[slow::ranks]) / alone, number * slowest(stages, ranks)[1]
        has = self._held(choice, lane, slow, counts, deal.most)
        terms["copies"], wire = exchanged(self.prices, choice, own, number, window, tied, has)
        for place in range(slow, len(stages), ranks) if lane.recomputes(counts) else ():
            _add(wire, self._sent_again(choice, lane, place, counts[place]), number * (1 + stages[place].parted))
        one = self._kept(choice, lane, slow, [1] * choice.chunks, counts)[0]
        moving, apart = moved(self.prices, choice, own, number, tied, has, one)
        there = window[1] + math.fsum(terms.get(what, 0.0) for what in ("bubble", "stages"))
        terms["offload"] = exposed(self.prices, moving, there) + apart
        terms["optimizer"] = updated(self.prices, choice, own, tied, has)
        if ranks > 1:
            terms["stages"] += met(self.prices, choice)[0]
        chosen = replace(
            choice,
            stages=lane.cuts.numbers if ranks > 1 else (),
            recompute=self._option(lane, counts),
            shares=deal.shares,
        )
        again = tuple(by_policy(lane.policies, each) for each in counts)
        each = (stages[place][0] - lane.works[place].sent_forward for place in range(slow, len(stages), ranks))
        forward = number * math.fsum(each)
        device, host, disk = fullest.device, fullest.host, fullest.disk
        return Estimate(chosen, terms, device, host, disk, wire, number, again, stages, forward=forward, moving=moving)

    def _sent_again(self, choice: Choice, lane: Lane, stage: int, counts: Counts) -> dict[str, float]:
        """Bytes that backward of a microbatch sends again, by what ranks divide."""
        found, rows = dict[str, float](), self.mean(choice.spread, choice.microbatch)
        for (place, _), numbers in zip(lane.cuts.blocks[stage], counts, strict=True):
            often = sum(each for policy, each in zip(lane.policies, numbers, strict=True) if policy != "none")
            _add(found, self.prices.wire(place, choice.spread, rows, again=True), often)
        return found

    def _fullest(self, choice: Choice, lane: Lane, counts: list[Counts], most: int) -> Held:
        """What the rank holds whose device is fullest; of equal ones that whose host is."""
        return max(self._ranks(choice, lane, counts, most), key=lambda each: (each.bytes, each.host))

    def each(self, choice: Choice) -> list[Held]:
        """What the ranks of a pipeline hold, of those that are alike one."""
        lane, counts = self.lane(choice), self.counts(choice)
        return self._ranks(choice, lane, counts, self.deal(choice, lane, counts).most)

    def _ranks(self, choice: Choice, lane: Lane, counts: list[Counts], most: int) -> list[Held]:
        plain, again = self._plain(*timing(choice), most), lane.recomputes(counts)
        alike = (each if again else [max(each, key=plain.__getitem__)] for each in lane.cuts.alike)
        return [self._held(choice, lane, rank, counts, most) for ranks in alike for rank in ranks]

    def _held(self, choice: Choice, lane: Lane, rank: int, counts: list[Counts], most: int) -> Held:
        """What a rank holds which has up to `most` microbatches."""
        if lane.recomputes(counts):
            kept, whole = self._kept(choice, lane, rank, self._flying(choice, rank, most), counts)
        else:
            kept, whole = self._plain(*timing(choice), most)[rank], 0.0
        stays = choice.on_device
        device = {**self._stands(choice, rank), "activations": stays * kept + whole}
        own = self._own(choice.spread, lane.stages, rank)
        return held(self.prices, choice, own, self.tied(choice.spread), device, (1 - stays) * kept)

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
        found, wire, ranks = self.lane(choice).cuts, dict(estimate.wire), spread.stages
        stages, rows = estimate.stages, self.mean(spread, choice.microbatch)
        slow, _ = slowest(stages, ranks)
        for place, many in (each for stage in found.pieces[slow::ranks] for each in stage):
            _add(wire, self.prices.wire(place, spread, rows), many * estimate.microbatches)
        if ranks > 1:
            meets, meeting = met(self.prices, choice)
            row = passed_on([each.boundary for each in found.sizes], ranks, choice.schedule)[slow]
            wire["stages"] = estimate.microbatches * rows * row + meeting
            timed = choice.schedule, ranks, estimate.microbatches, choice.chunks, stages, self.message(choice)
            terms["stages"] -= meets  # which follows the last action
            seconds = simulated(*timed, self.prices.slowest.crowd, self.task.cluster.per_host)
            terms = within(terms, seconds)
            terms["stages"] += meets
            if estimate.moving:
                terms["offload"] = exposed(self.prices, estimate.moving, seconds)
        return replace(estimate, terms=terms, wire=wire, message=self.message(choice))


def _add(sums: dict[str, float], more: Mapping[str, float], times: float) -> None:
    for what, value in more.items():
        sums[what] = sums.get(what, 0.0) + times * value
