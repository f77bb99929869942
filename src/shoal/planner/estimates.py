"""What a choice takes and holds, by closed forms; where its memory is short, which blocks are computed again, stage by
stage, in the least time (see knapsack). What is chosen is timed by its schedule's own list of actions (`simulated`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from shoal.module.chosen_blocks import as_ranges, chosen_blocks
from shoal.plan import Option, option_parameters
from shoal.planner.costs import Prices, Sizes, together
from shoal.planner.degrees import Spread
from shoal.planner.exchanges import exchanged, moved, updated
from shoal.planner.held import Held, held, standing, tied_elements
from shoal.planner.knapsack import Counts
from shoal.planner.lanes import GIVEN, Cuts, Lane, by_policy, cut_for, fill_of, policies_of, seconds_of, within
from shoal.planner.pipes import Pace, parted, simulated, slowest, under_way, waiting
from shoal.planner.replicas import Dealt, Replicas, dealt, replicas_of
from shoal.planner.task import Choice, Estimate, Task


class Estimates:
    """The prices of a task's choices."""

    def __init__(self, task: Task) -> None:
        self.task, self.prices, self.policies = task, Prices(task), policies_of(task)
        self.by_compile = self.prices, Prices(task, compiled=True)  # blocks as they are written, and compiled
        self._lane, self._cuts = cache(self._new_lane), cache(self._new_cuts)
        self.replicas = cache(self._new_replicas)
        self._own, self._plain = cache(self._new_own), cache(self._new_plain)

    def _new_cuts(self, spread: Spread, stages: int) -> Cuts:
        return cut_for(self.prices, spread, stages)

    def _new_lane(self, spread: Spread, rows: int, chunks: int, compiled: bool, policies: tuple[str, ...]) -> Lane:
        return Lane(self.by_compile[compiled], self._cuts(spread, spread.stages * chunks), spread, rows, policies)

    def _new_replicas(self, spread: Spread) -> Replicas:
        return replicas_of(self.prices, spread)

    def lane(self, choice: Choice) -> Lane:
        """The stages of a choice."""
        policies = policies_of(self.task, choice.compile and choice.recompute == "none")
        return self._lane(choice.spread, choice.microbatch, choice.chunks, choice.compile, policies)

    def _new_own(self, spread: Spread, stages: int, rank: int) -> Sizes:
        own = self._cuts(spread, stages).sizes[rank :: spread.stages]
        return own[0] if len(own) == 1 else together([(each, 1) for each in own])

    def estimate(self, choice: Choice) -> Estimate:
        """What `choice` takes and holds where each stage computes again what it must, in the least time; as pinned,
        where that is. What travels is left out (see `simulated`)."""
        return self.priced(choice, self.counts(choice))

    def most(self, choice: Choice) -> float:
        """Bytes that a rank may use of its device: with a budget of `plan.memory` those."""
        said = None if choice.offload is None or self.prices.slowest.on_host else choice.offload.device
        return self.task.most if said is None else min(self.task.most, said)

    def least(self, choice: Choice) -> float:
        """Seconds that no estimate with the stages and microbatches of `choice` is below."""
        lane = self.lane(choice)
        found = self._in_lane(choice, lane, lane.none(), together=False)
        return math.fsum(found[0].values())

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
        plain = self._plain(*_timing(choice), number)
        for ranks in lane.cuts.alike:
            room = self.most(choice) - math.fsum(self._standing(choice, ranks[0]).values())
            for rank in ranks:
                stays = choice.on_device
                if stays * plain[rank] <= room or not stays:
                    continue
                need = plain[rank] - room / stays
                found = self._cheapest(choice, lane, rank, self._flying(choice, rank, number), need)
                for place, own in zip(range(rank, len(counts), lane.ranks), lane.split(rank, found), strict=True):
                    counts[place] = own
        return counts

    def _cheapest(self, choice: Choice, lane: Lane, rank: int, flying: tuple[int, ...], need: float) -> Counts:
        """The counts of a rank's blocks that free `need` bytes in the least time; where none do, those that free
        most."""
        whole = self._own(choice.spread, len(lane.works), rank).largest * choice.microbatch
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
        parameters = option_parameters(given)
        number = sum(len(numbers) for blocks in lane.cuts.blocks for _, numbers in blocks)
        full, some = chosen_blocks(number, *(parameters.get(key, default) for key, default in GIVEN.items()))
        ways = {**dict.fromkeys(full, "full"), **dict.fromkeys(some, "selective")}
        return [
            tuple(
                tuple(sum(ways.get(each, "none") == policy for each in numbers) for policy in lane.policies)
                for _, numbers in blocks
            )
            for blocks in lane.cuts.blocks
        ]

    def _flying(self, choice: Choice, rank: int, number: int) -> tuple[int, ...]:
        ranks = choice.spread.stages
        return under_way(choice.schedule, ranks, number, choice.chunks)[rank] if ranks > 1 else (1,)

    def _standing(self, choice: Choice, rank: int) -> dict[str, float]:
        ranks = choice.spread.stages
        own = self._own(choice.spread, ranks * choice.chunks, rank)
        return standing(self.prices, choice, own, rank == ranks - 1, tied_elements(self.prices, choice.spread))

    def _new_plain(self, spread: Spread, rows: int, schedule: str, chunks: int, number: int) -> tuple[float, ...]:
        """Bytes of the activations of each rank of a pipeline where nothing is computed again."""
        choice = Choice(spread, rows, schedule=schedule, chunks=chunks)
        sizes, ranks = self._cuts(spread, spread.stages * chunks).sizes, spread.stages
        return tuple(
            rows * sum(number * size.saved["none"] for number, size in zip(flying, sizes[rank::ranks], strict=True))
            for rank in range(ranks)
            for flying in [self._flying(choice, rank, number)]
        )

    def _kept(
        self, choice: Choice, lane: Lane, rank: int, flying: Sequence[int], counts: Sequence[Counts]
    ) -> tuple[float, float]:
        """Bytes of the activations of a rank: those that wait for a backward, and those of the block that is computed
        again."""
        kept, again = lane.kept(rank, flying, counts)
        whole = self._own(choice.spread, len(lane.works), rank).largest if again else 0.0
        return choice.microbatch * kept, choice.microbatch * whole

    def priced(self, choice: Choice, counts: list[Counts]) -> Estimate:
        """What `choice` takes and holds where the stages treat their blocks so."""
        spread, lane, ranks = choice.spread, self.lane(choice), choice.spread.stages
        terms, deal, stages, slow = self._in_lane(choice, lane, counts, self._meets(choice))
        own, tied = self._own(spread, len(lane.works), slow), tied_elements(self.prices, spread)
        number = deal.number
        window = sum(each.backward for each in stages[slow::ranks]), number * slowest(stages, ranks)[1]
        has = self._held(choice, lane, slow, counts, deal.most)
        terms["copies"], wire = exchanged(self.prices, choice, own, number, window, tied, has)
        one = self._kept(choice, lane, slow, [1] * choice.chunks, counts)[0]
        terms["offload"] = moved(self.prices, choice, own, number, window[1], tied, has, one)
        terms["optimizer"] = updated(self.prices, choice, own, tied, has)
        fullest = self._fullest(choice, lane, counts, deal.most)
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
        return Estimate(chosen, terms, device, host, disk, wire, number, again, stages, forward=forward)

    def _fullest(self, choice: Choice, lane: Lane, counts: list[Counts], most: int) -> Held:
        """What the rank holds whose device is fullest; of equal ones that whose host is."""
        plain, again = self._plain(*_timing(choice), most), self._recomputes(counts)
        alike = (each if again else [max(each, key=plain.__getitem__)] for each in lane.cuts.alike)
        found = [self._held(choice, lane, rank, counts, most) for ranks in alike for rank in ranks]
        return max(found, key=lambda each: (math.fsum(each.device.values()), each.host))

    def _held(self, choice: Choice, lane: Lane, rank: int, counts: list[Counts], most: int) -> Held:
        """What a rank holds which has up to `most` microbatches."""
        if self._recomputes(counts):
            kept, whole = self._kept(choice, lane, rank, self._flying(choice, rank, most), counts)
        else:
            kept, whole = self._plain(*_timing(choice), most)[rank], 0.0
        stays = choice.on_device
        device = {**self._standing(choice, rank), "activations": stays * kept + whole}
        own = self._own(choice.spread, len(lane.works), rank)
        return held(self.prices, choice, own, tied_elements(self.prices, choice.spread), device, (1 - stays) * kept)

    def _meets(self, choice: Choice) -> bool:
        """Whether replicas run as many microbatches, since they meet in their forwards."""
        return choice.zero == 3 or choice.offload is not None or choice.spread.experts > 1

    def deal(self, choice: Choice, lane: Lane, counts: list[Counts], together: bool | None = None) -> Dealt:
        """How many microbatches each replica has."""
        return self._dealt(choice, lane, counts, self._meets(choice) if together is None else together)[0]

    def _dealt(
        self, choice: Choice, lane: Lane, counts: list[Counts], together: bool
    ) -> tuple[Dealt, list[Pace], dict[int, tuple[float, dict[str, float]]]]:
        """The deal; the seconds of all stages on the replica that takes longest; what stages compute again."""
        again = {place: lane.again(place, own) for place, own in enumerate(counts)} if self._recomputes(counts) else {}
        replicas: Replicas = self.replicas(choice.spread)
        number = math.ceil(self.task.rows / choice.microbatch)
        halves = parted(choice.schedule, lane.ranks, math.ceil(number / len(replicas.kinds)), choice.chunks)
        timed = [seconds_of(lane, speeds, again, halves) for speeds in replicas.speeds]
        paces = [(slowest(stages, lane.ranks)[1], fill_of(choice, lane, stages)) for stages in timed]
        pinned = tuple(self.task.pins.get("shares", ()))
        if "shares" in self.task.pins and not pinned and len(paces) > 1:
            pinned = (1,) * choice.spread.copies
        found = dealt(number, paces, replicas, pinned, together)
        return found, timed[found.slowest], again

    def _recomputes(self, counts: list[Counts]) -> bool:
        first = 1 if self.policies[0] == "none" else 0
        return any(any(each[first:]) for own in counts for each in own)

    def _in_lane(
        self, choice: Choice, lane: Lane, counts: list[Counts], together: bool
    ) -> tuple[dict[str, float], Dealt, tuple[Pace, ...], int]:
        """The terms that do not depend on what copies of the model share; the deal; seconds of all stages, and the rank
        of the pipeline that others wait for."""
        deal, stages, again = self._dealt(choice, lane, counts, together)
        number, ranks = deal.number, lane.ranks
        slow, busy = slowest(stages, ranks)
        busy *= number
        sent: dict[str, float] = {}
        for place in range(slow, len(stages), ranks):
            repeated = again[place][1] if again else {}
            for sends, times in ((lane.works[place].sent, number), (repeated, number * (1 + stages[place].parted))):
                for what, seconds in sends.items():
                    sent[what] = sent.get(what, 0.0) + times * seconds
        terms = {"compute": busy - math.fsum(sent.values()), **sent}
        if ranks > 1:
            terms["bubble"] = waiting(fill_of(choice, lane, stages), busy, ranks, self.prices.slowest.crowd)
            hops = (ranks - 1) * choice.chunks + number * choice.chunks * (1 - self.task.cluster.overlap)
            terms["stages"] = 2 * hops * self.message(choice)
        terms["data"] = number * choice.microbatch * self.task.cluster.data
        terms["other"] = self.task.cluster.step
        return terms, deal, tuple(stages), slow

    def _option(self, lane: Lane, counts: list[Counts]) -> Option:
        """The plan's `recompute`."""
        if (given := self.task.pins.get("recompute")) is not None:
            return given if isinstance(given, str) else dict(given)
        if len(lane.policies) == 1 or not self._recomputes(counts):
            return lane.policies[0]
        places = {policy: lane.places(policy, counts) for policy in ("full", "selective")}
        number = sum(len(numbers) for blocks in lane.cuts.blocks for _, numbers in blocks)
        if not any(places.values()):
            return "none"
        for policy, own in places.items():
            if len(own) == number:
                return policy
        return {"name": "blocks", **{policy: as_ranges(own) for policy, own in places.items() if own}}

    def message(self, choice: Choice) -> float:
        """Seconds of what travels between two stages, the longest way."""
        spread = choice.spread
        if spread.stages == 1:
            return 0.0
        sizes = self._cuts(spread, spread.stages * choice.chunks).sizes
        link = self.task.cluster.link(spread.stride("stages"), spread.stages, "send")
        return link.seconds("send", max(each.boundary for each in sizes[1:]) * choice.microbatch, 2)

    def simulated(self, estimate: Estimate) -> Estimate:
        """The estimate with the bytes that travel, and of a pipeline with the waiting that its schedule's own lists of
        actions have."""
        choice, terms, spread = estimate.choice, dict(estimate.terms), estimate.choice.spread
        found, wire, ranks = self.lane(choice).cuts, dict(estimate.wire), spread.stages
        stages = estimate.stages
        slow, _ = slowest(stages, ranks)
        for place, many in (each for stage in found.pieces[slow::ranks] for each in stage):
            for what, nbytes in self.prices.wire(place, spread, choice.microbatch).items():
                wire[what] = wire.get(what, 0.0) + many * estimate.microbatches * nbytes
        if ranks > 1:
            ends = sum(each.boundary for each in found.sizes[1:]) / (len(found.sizes) - 1)
            wire["stages"] = 2 * choice.chunks * estimate.microbatches * ends * choice.microbatch
            timed = choice.schedule, ranks, estimate.microbatches, choice.chunks, stages, self.message(choice)
            terms = within(terms, simulated(*timed, self.prices.slowest.crowd))
        return replace(estimate, terms=terms, wire=wire, message=self.message(choice))


def _timing(choice: Choice) -> tuple[Spread, int, str, int]:
    """What decides which microbatches are under way."""
    return choice.spread, choice.microbatch, choice.schedule, choice.chunks
