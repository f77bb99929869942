"""Asks the planner for a job file: the memory it will need, and the largest model of its family that would fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

from shoal.device import any_device, free_memory
from shoal.errors import UserError, in_section
from shoal.jobs.choose import Settled, Sizes, microbatches_of, settle, with_plan
from shoal.jobs.optimizers import optimizer_named
from shoal.jobs.plans import plan_at
from shoal.jobs.ranks import ranks_here
from shoal.jobs.read import load_job
from shoal.models import build
from shoal.optim.groups import decay_matrices_only
from shoal.parallel.tensor import CutLayers
from shoal.plan import Plan
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
    others,
    predict,
    that_fit,
)
from shoal.precision import precision
from shoal.report.memory import read_memory


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


@dataclass(frozen=True)
class Answer:
    """The planner's answer for a job.

    parameters, microbatch: number of parameters of the model, of samples in a microbatch.
    prediction: of the rank that needs most.
    instead: where the job does not fit, plans that do, or else the one that lacks least.
    stages: in a pipeline, a prediction for each rank along pp.
    layers: how plan.tp and plan.ep divide each layer.
    later: after the steps of `[[run.at]]`, predictions under the plan from there on.
    """

    settled: Settled
    machine: Machine
    parameters: int
    microbatch: int
    prediction: Prediction
    instead: tuple[Prediction, ...]
    largest: Largest | None
    stages: tuple[Prediction, ...] = ()
    layers: CutLayers = field(default_factory=CutLayers)
    later: tuple[tuple[int, Prediction], ...] = ()

    @property
    def fits(self) -> bool:
        """Whether there is room under every plan of the job."""
        return all(each.free >= 0 for each in (self.prediction, *(found for _, found in self.later)))

    def to_dict(self) -> dict[str, Any]:
        """Returns the answer as JSON values; memory in bytes."""
        return {
            "parameters": self.parameters,
            "microbatch": self.microbatch,
            "machine": asdict(self.machine),
            **_prediction(self.prediction),
            "instead": [_prediction(each) for each in self.instead],
            "stages": [_prediction(each) for each in self.stages],
            "layers": [asdict(each) for each in self.layers.layers],
            "largest": None if self.largest is None else asdict(self.largest),
            "later": [{"step": step, **_prediction(each)} for step, each in self.later],
        }


def _prediction(found: Prediction) -> dict[str, Any]:
    sizes = [] if found.sizes is None else [{**asdict(each), "waste": each.waste} for each in found.sizes.candidates]
    return {
        "plan": found.plan.to_dict(),
        "rows": [asdict(row) for row in found.need.rows],
        "smallest_device": found.smallest,
        "chunk_bytes": found.chunk_bytes,
        "chunks": len(found.chunks),
        "chunk_sizes": sizes,
        "fits": [{**asdict(fit), "free": fit.free} for fit in found.fits],
    }


def machine_here(ranks: int) -> Machine:
    """Returns the memory that is free on this machine now, for a host with `ranks` ranks."""
    return Machine(psutil.virtual_memory().available, free_memory(any_device()), ranks)


def plan_memory(
    path: Path,
    assignments: Sequence[str] = (),
    device: int | None = None,
    host: int | None = None,
    process: int | None = None,
) -> Answer:
    """Predicts the memory of the job file at `path` on this machine. Nothing is trained, and the model takes no memory.

    device, host: free bytes of each GPU and of each host to assume instead of this machine's.
    process: bytes of an interpreter with torch; by default of this process.

    Raises UserError for an invalid job.
    """
    job, origins = load_job(path, assignments)
    on_host = ranks_here(job)
    sizes = Sizes(max(on_host, job.plan.size), on_host)
    settled = settle(job, origins, sizes)
    machine = machine_here(on_host)
    machine = replace(machine, device=device or machine.device, host=host or machine.host)
    process = read_memory(torch.device("cpu")).bytes if process is None else process
    forecast = Forecast(settled, machine, process)
    plan = settled.job.plan
    prediction = forecast.predict(plan)
    instead = that_fit(others(plan), forecast.predict) if prediction.free < 0 else []
    recording = forecast.recording(settled.job.model, plan)
    steps = [change["step"] for change in settled.job.run.at]
    plans = [with_plan(settled, plan_at(settled.job, step, sizes.size), sizes) for step in steps]
    later = [Forecast(each, machine, process).predict(each.job.plan) for each in plans]
    return Answer(
        settled,
        machine,
        recording.num_parameters,
        forecast.microbatch,
        prediction,
        tuple(instead),
        forecast.largest(),
        stages=tuple(forecast.predict_each(plan)) if plan.pipelined else (),
        layers=recording.layers,
        later=tuple(zip(steps, later, strict=True)),
    )


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
        own = None if plan.pipelined else family(job.model, values)
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
        dry for each size."""
        job, plan = self._settled.job, self._settled.job.plan
        if plan.pipelined:
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
