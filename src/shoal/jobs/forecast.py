"""Predictions of memory for one job: under any plan, and the largest model of its family that fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from shoal.errors import UserError, in_section
from shoal.jobs.choose import Settled, microbatches_of
from shoal.jobs.dry_runs import DryRuns, Places
from shoal.jobs.optimizers import optimizer_named
from shoal.parallel.tensor import names_blocks
from shoal.pipeline import schedule_of
from shoal.plan import Plan, option_name
from shoal.planner import (
    DISK,
    HOST,
    SHALLOW,
    TIERS,
    Asks,
    Family,
    Fit,
    Machine,
    Prediction,
    Recording,
    family,
    largest,
    predict,
)
from shoal.precision import precision

Members = Callable[[int], Places]
"""What the ranks do with a model of a family, by its size."""


@dataclass(frozen=True)
class Largest:
    """The largest member of a model's family that fits.

    rule: how the members of the family differ, in words.
    table: its `[model]` table; None where not even the smallest member fits.
    parameters: its number of parameters.
    """

    rule: str
    table: dict[str, Any] | None
    parameters: int


def needed(prediction: Prediction) -> int:
    """Returns the bytes that a rank needs in all tiers together."""
    return sum(prediction.need.total(tier) for tier in TIERS)


class Forecast:
    """Predictions for one job. A dry run is made once for each model, recompute policy and pipeline; `known`: those of
    the same job under another plan."""

    def __init__(self, settled: Settled, machine: Machine, process: int, known: DryRuns | None = None) -> None:
        self._settled, self._machine, self._process = settled, machine, process
        train = settled.job.train
        with in_section("train"):
            self._precision = precision(train.precision)
        self._optimizer = optimizer_named(train.optimizer, train.lr)
        self.microbatch, self._microbatches = microbatches_of(settled.job)
        self.runs = DryRuns(settled, self._precision) if known is None else known.under(settled)
        run = settled.job.run
        self._asks = Asks(train.sync_bn, "norms_every" if run.norms_every else None, run.verify_every > 0)

    def recording(self, plan: Plan) -> Recording:
        """What the first rank does with the job's own model."""
        return self._own(plan)[0]

    def _own(self, plan: Plan) -> Places:
        """What the ranks do with the job's own model: under its own plan by a dry run of all of it. Where others of its
        family follow from few blocks, so does it under a plan by which all blocks are computed again."""
        table, own = self._settled.job.model, self._settled.job.plan
        if plan != own and option_name(plan.recompute, "recompute") == "full" and not _names_blocks(own):
            found = self._family
            if found is not None and found.depth is not None and self.runs.proved(table, found.depth, own):
                return self.runs.deep(table, found.depth, plan) or self.runs.whole(table, plan)
        return self.runs.whole(table, plan)

    def predict(self, plan: Plan) -> Prediction:
        """Predicts the rank that needs most; a host has what all its ranks need."""
        return self._fullest(self._own(plan), plan)

    def predict_each(self, plan: Plan) -> list[Prediction]:
        """Predicts each place of the pipeline."""
        return [self._predict(each, plan, self._alike(plan)) for each in self._own(plan)]

    def of(self, plan: Plan, places: Iterable[int]) -> list[Prediction]:
        """Predicts some places of the pipeline; a deep model by a shallow one that says all."""
        job, values = self._settled.job, self._settled.model.values
        own, deep = None if names_blocks(plan.placements or {}) else self._family, None
        if own is not None and own.depth is not None and values[own.depth] > SHALLOW + 1:
            with suppress(UserError):  # the model cannot be as shallow
                several = option_name(plan.recompute, "recompute") == "blocks"
                deep = (self.runs.treated if several else self.runs.deep)(job.model, own.depth, plan)
        recorded = deep or self.runs.whole(job.model, plan)
        return [self._predict(recorded[place], plan, self._alike(plan)) for place in places]

    @cached_property
    def _family(self) -> Family | None:
        """The family of the job's model; None also of a configuration that lists its layers one by one, which has no
        other number of them."""
        job = self._settled.job
        found = family(job.model, self._settled.model.values)
        if found is not None and found.depth is not None:
            try:
                self.runs.model(found.member(found.own + 1))
            except UserError:
                return None
        return found

    def _alike(self, plan: Plan) -> int:
        """Ranks of a host that are at the same place of the pipeline."""
        return min(self._machine.ranks, plan.stage_size) if plan.pipelined else self._machine.ranks

    def _fullest(self, recorded: Places, plan: Plan) -> Prediction:
        at = cache(lambda place, ranks: self._predict(recorded[place], plan, ranks))
        most = max((at(place, self._alike(plan)) for place in range(len(recorded))), key=needed)
        if not plan.pipelined:
            return most
        here, each = self._machine.ranks, plan.stage_size
        hosts = {
            tuple(rank // each for rank in range(first, min(first + here, plan.size)))
            for first in range(0, plan.size, here)
        }
        fits = [_of_a_host(at, Counter(places)) for places in hosts]
        return replace(most, fits=tuple(min(column, key=lambda fit: fit.free) for column in zip(*fits, strict=True)))

    def _predict(self, recording: Recording, plan: Plan, ranks: int) -> Prediction:
        machine = replace(self._machine, ranks=ranks)
        asked = self._optimizer, plan, self._precision, machine, self._microbatches, self._process, self._asks
        return predict(recording, *asked)

    def largest(self) -> Largest | None:
        """Finds the largest model under the job's own plan, with stages cut anew; not where `recompute` or
        `placements` name blocks, which other sizes have not."""
        job = self._settled.job
        found = None if _names_blocks(job.plan) else self._family
        if found is None or (job.plan.pipelined and found.depth is None):
            return None
        plan, even = replace(job.plan, stages=None), job.plan.head_sharers
        few = self._too_few(found, even)
        known = self._known(found, even, few)
        if known[few] < 0:
            return Largest(found.rule, None, 0)
        for sure in (False, True):
            recorded = self._members(found, plan, sure)
            asked = set[int]()

            def free(size: int, recorded: Members = recorded, asked: set[int] = asked) -> int:
                asked.add(even * size)
                return self._fullest(recorded(even * size), plan).free

            size = even * largest(free, known=known, growth=found.growth)
            if sure or self._as_assumed(found, plan, {size, size + even} & asked):
                break
        if size <= even * few:
            return Largest(found.rule, None, 0)
        return Largest(found.rule, found.member(size), recorded(size)[0].num_parameters)

    def _as_assumed(self, found: Family, plan: Plan, sizes: Iterable[int]) -> bool:
        """Whether the models on either side of the largest size are what the search took them for, so that those
        between, which were not built, do not matter."""
        key, job = found.depth, self._settled.job
        if key is None or not self.runs.proved(job.model, key, plan):
            return True
        return all(self.runs.as_assumed(found.member(size), key) for size in sizes)

    def _too_few(self, found: Family, even: int) -> int:
        """The largest size, in steps of `even`, that has fewer blocks than the plan has stages; 0 if none has."""
        plan, size = self._settled.job.plan, 0
        stages = schedule_of(plan, 1).stages if plan.pipelined else 1
        while stages > 1 and self.runs.model(found.member(even * (size + 1))).values[str(found.depth)] < stages:
            size += 1
        return size

    def _known(self, found: Family, even: int, few: int) -> dict[int, int]:
        """What is left with no model, which is said of the size `few`, and with the job's own if it is of the family,
        by size in steps of `even`."""
        job, model = self._settled.job, self._settled.model
        prediction = self.predict(job.plan)
        ranks, process = self._machine.ranks, prediction.need.of("process")
        known = {few: min(fit.available - ranks * process * (fit.memory == HOST) for fit in prediction.fits)}
        is_member = found.own % even == 0 and self.runs.model(found.member(found.own)).values == model.values
        if is_member and job.plan.stages is None:
            known[found.own // even] = prediction.free
        return known

    def _members(self, found: Family, plan: Plan, sure: bool) -> Members:
        """Records members of a family by size: from few blocks, if that proves exact for the job's own model. `sure`:
        each member is built to see that its blocks are alike."""
        key, runs = found.depth, self.runs
        proved = key is not None and runs.proved(self._settled.job.model, key, plan)

        @cache
        def recorded(size: int) -> Places:
            table = found.member(size)
            deep = runs.deep(table, key, plan, sure) if key is not None and proved else None
            return runs.whole(table, plan) if deep is None else deep

        return recorded


def _of_a_host(at: Callable[[int, int], Prediction], places: Counter[int]) -> list[Fit]:
    """What a host with so many ranks of each place of a pipeline needs and has."""
    found = [(at(place, ranks).fits, ranks) for place, ranks in places.items()]
    fits = []
    for column in zip(*(fits for fits, _ in found), strict=True):
        memory, available = column[0].memory, column[0].available
        if memory == DISK:  # each rank has its share of what is free for all of the host
            available = min(
                fit.available * ranks // places.total() for fit, (_, ranks) in zip(column, found, strict=True)
            )
        fits.append(Fit(memory, (sum if memory == HOST else max)(fit.needed for fit in column), available))
    return fits


def _names_blocks(plan: Plan) -> bool:
    """Whether some blocks are computed again, or cut, and others are not."""
    return option_name(plan.recompute, "recompute") == "blocks" or names_blocks(plan.placements or {})
