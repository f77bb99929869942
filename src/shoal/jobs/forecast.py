"""Predictions of memory for one job: under any plan, and the largest model of its family that fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from shoal.errors import UserError, in_section
from shoal.jobs.choose import Settled, microbatches_of
from shoal.jobs.optimizers import optimizer_named
from shoal.models import build
from shoal.optim.groups import decay_matrices_only
from shoal.plan import Plan, option_name
from shoal.planner import (
    DISK,
    HOST,
    SHALLOW,
    TIERS,
    Family,
    Fit,
    Machine,
    Prediction,
    Recording,
    Subject,
    alike_blocks,
    deepened,
    dry_run,
    equal,
    family,
    largest,
    predict,
)
from shoal.precision import precision


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
    """Predictions for one job. A dry run is made once for each model, recompute policy and rank along pp."""

    def __init__(self, settled: Settled, machine: Machine, process: int) -> None:
        self._settled, self._machine, self._process = settled, machine, process
        train = settled.job.train
        with in_section("train"):
            self._precision = precision(train.precision)
        self._optimizer = optimizer_named(train.optimizer, train.lr)
        self.microbatch, self._microbatches = microbatches_of(settled.job)
        self._sample = settled.model.prepare_data(settled.data.train)[0]
        self._recordings: dict[str, Recording] = {}

    def recording(self, table: Mapping[str, Any], plan: Plan, place: int = 0) -> Recording:
        model = build(table)
        # by all settings of the model: what one table leaves to a preset or a default, another may give
        settings = (model.name, table.get("loss"), model.values)
        key = repr((settings, plan.recompute, plan.division, place))
        if key not in self._recordings:
            groups = decay_matrices_only(self._settled.job.train.weight_decay)
            rank = place * plan.stage_size
            subject = Subject(
                model.factory, model.loss, self._sample, self.microbatch, self._precision, plan, groups, rank=rank
            )
            self._recordings[key] = dry_run(subject)
        return self._recordings[key]

    def predict(self, plan: Plan) -> Prediction:
        """Predicts the rank that needs most; a host has what all its ranks need."""
        most = max(self.predict_each(plan), key=needed)
        if not plan.pipelined:
            return most
        here, each = self._machine.ranks, plan.stage_size
        hosts = {
            tuple(rank // each for rank in range(first, min(first + here, plan.size)))
            for first in range(0, plan.size, here)
        }
        fits = [self._fits(plan, Counter(places)) for places in hosts]
        return replace(most, fits=tuple(min(column, key=lambda fit: fit.free) for column in zip(*fits, strict=True)))

    def _fits(self, plan: Plan, places: Counter[int]) -> list[Fit]:
        """What a host with so many ranks of each place of a pipeline needs and has."""
        found = [(self._one(plan, place, ranks).fits, ranks) for place, ranks in places.items()]
        fits = []
        for column in zip(*(fits for fits, _ in found), strict=True):
            memory, available = column[0].memory, column[0].available
            if memory == DISK:  # each rank has its share of what is free for all of the host
                available = min(
                    fit.available * ranks // places.total() for fit, (_, ranks) in zip(column, found, strict=True)
                )
            fits.append(Fit(memory, (sum if memory == HOST else max)(fit.needed for fit in column), available))
        return fits

    def predict_each(self, plan: Plan) -> list[Prediction]:
        """Predicts each place of the pipeline."""
        ranks = min(self._machine.ranks, plan.stage_size) if plan.pipelined else self._machine.ranks
        return [self._one(plan, place, ranks) for place in range(plan.pp)]

    def of(self, plan: Plan, place: int) -> Prediction:
        """Predicts one place of the pipeline; without stages, a deep model by a shallow one that says all."""
        ranks = min(self._machine.ranks, plan.stage_size) if plan.pipelined else self._machine.ranks
        job, values = self._settled.job, self._settled.model.values
        own = None if plan.pipelined or _names_blocks(plan) else family(job.model, values)
        if own is not None and own.depth is not None and values[own.depth] > SHALLOW + 1:
            deep = self._deepened(job.model, own.depth, plan)
            if deep is not None:
                return self._predict(deep, plan, ranks)
        return self._one(plan, place, ranks)

    def _one(self, plan: Plan, place: int, ranks: int) -> Prediction:
        return self._predict(self.recording(self._settled.job.model, plan, place), plan, ranks)

    def _predict(self, recording: Recording, plan: Plan, ranks: int | None = None) -> Prediction:
        machine = self._machine if ranks is None else replace(self._machine, ranks=ranks)
        return predict(recording, self._optimizer, plan, self._precision, machine, self._microbatches, self._process)

    def largest(self) -> Largest | None:
        """Finds the largest model under the job's own plan; not of a pipeline, whose stages would all have to be run
        dry for each size, nor where `recompute` names blocks, which other sizes have not."""
        job, plan = self._settled.job, self._settled.job.plan
        if plan.pipelined or _names_blocks(plan):
            return None
        found = family(job.model, self._settled.model.values)
        if found is None:
            return None
        even = plan.head_sharers
        recorded = self._members(found, plan)

        def free(size: int) -> int:
            return self._predict(recorded(even * size), plan).free

        size = even * largest(free, known=self._known(found, even))
        if size == 0:
            return Largest(found.rule, None, 0)
        return Largest(found.rule, found.member(size), recorded(size).num_parameters)

    def _known(self, found: Family, even: int) -> dict[int, int]:
        """What is left with no model, and with the job's own if it is of the family, by size in steps of `even`."""
        job, model = self._settled.job, self._settled.model
        prediction = self.predict(job.plan)
        ranks, process = self._machine.ranks, prediction.need.of("process")
        known = {0: min(fit.available - ranks * process * (fit.memory == HOST) for fit in prediction.fits)}
        if found.own % even == 0 and build(found.member(found.own)).values == model.values:
            known[found.own // even] = prediction.free
        return known

    def _members(self, found: Family, plan: Plan) -> Callable[[int], Recording]:
        """Records members of a family by size: of deep ones a shallow one is run, if that proves exact for the job's
        own model."""
        key = found.depth
        proved = key is not None and self._proved(key, plan)

        @cache
        def recorded(size: int) -> Recording:
            table = found.member(size)
            deep = self._deepened(table, key, plan) if key is not None and proved else None
            return self.recording(table, plan) if deep is None else deep

        return recorded

    def _proved(self, key: str, plan: Plan) -> bool:
        """Whether the recording of the job's own model, or of one block more than a shallow one, equals the deepened
        one."""
        table, number = self._settled.job.model, self._settled.model.values[key]
        own = table if number > SHALLOW else {**table, key: SHALLOW + 1}
        try:
            deep = self._deepened(own, key, plan)
            return deep is not None and equal(deep, self.recording(own, plan))
        except UserError:  # the model cannot be as shallow
            return False

    def _deepened(self, table: Mapping[str, Any], key: str, plan: Plan) -> Recording | None:
        """The recording of the model of `table` from that of one with `SHALLOW` blocks, None where that does not say
        all."""
        shallow = {**table, key: SHALLOW}
        blocks = alike_blocks(build(shallow).factory, build(table).factory, self._precision)
        return None if blocks is None else deepened(self.recording(shallow, plan), blocks)


def _names_blocks(plan: Plan) -> bool:
    """Whether some blocks are computed again and others are not."""
    return option_name(plan.recompute, "recompute") == "blocks"
