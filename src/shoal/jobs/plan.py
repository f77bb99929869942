"""What a job will need of memory, and the largest model of its family that the machine would hold: the planner's questions, asked for a job file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from shoal.errors import in_section
from shoal.jobs.assemble import optimizer_named
from shoal.jobs.choose import Settled, Sizes, microbatches_of, ranks_here, settle
from shoal.jobs.read import load_job
from shoal.models import build
from shoal.optim.optimizer import decay_matrices_only
from shoal.parallel.tensor import CutLayers
from shoal.plan import Plan
from shoal.planner import (
    DISK,
    HOST,
    TIERS,
    Fit,
    Machine,
    Prediction,
    Recording,
    Subject,
    dry_run,
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
    """The largest member of a model's family that fits: its `[model]` table and number of parameters, None where not even the smallest does."""

    rule: str
    table: dict[str, Any] | None
    parameters: int


@dataclass(frozen=True)
class Answer:
    """A job's prediction; where it does not fit, `instead`: plans that do, or the one that lacks least. `prediction`: of a pipeline that of the place that needs most; `stages`: of each place; `layers`: what plan.tp and plan.ep make of each layer."""

    settled: Settled
    machine: Machine
    parameters: int
    microbatch: int
    prediction: Prediction
    instead: tuple[Prediction, ...]
    largest: Largest | None
    stages: tuple[Prediction, ...] = ()
    layers: CutLayers = field(default_factory=CutLayers)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: bytes as numbers."""
        return {
            "parameters": self.parameters,
            "microbatch": self.microbatch,
            "machine": asdict(self.machine),
            **_prediction(self.prediction),
            "instead": [_prediction(each) for each in self.instead],
            "stages": [_prediction(each) for each in self.stages],
            "layers": [asdict(each) for each in self.layers.layers],
            "largest": None if self.largest is None else asdict(self.largest),
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
    """What is free on this machine now."""
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
    return Machine(psutil.virtual_memory().available, free, ranks)


def plan_memory(
    path: Path, assignments: Sequence[str] = (), device: int | None = None, host: int | None = None, process: int | None = None
) -> Answer:
    """For the job file at `path`, on this machine, or on one with so many bytes of `device` (of each GPU) and `host` memory. Nothing is trained, and the
    model takes no memory. `process`: bytes of an interpreter with torch, by default of this one. Raises UserError for a wrong job."""
    job, origins = load_job(path, assignments)
    on_host = ranks_here(job)
    settled = settle(job, origins, Sizes(max(on_host, job.plan.size), on_host))
    machine = machine_here(on_host)
    machine = replace(machine, device=device or machine.device, host=host or machine.host)
    process = read_memory(torch.device("cpu")).bytes if process is None else process
    asked = _Asked(settled, machine, process)
    plan = settled.job.plan
    prediction = asked.predict(plan)
    instead = that_fit(others(plan), asked.predict) if prediction.free < 0 else []
    recording = asked.recording(settled.job.model, plan)
    stages = tuple(asked.predict_each(plan)) if plan.pp > 1 else ()
    return Answer(
        settled,
        machine,
        recording.num_parameters,
        asked.microbatch,
        prediction,
        tuple(instead),
        asked.largest(),
        stages,
        recording.layers,
    )


def needed(prediction: Prediction) -> int:
    """Bytes of a rank, of all tiers."""
    return sum(prediction.need.total(tier) for tier in TIERS)


class _Asked:
    """Predictions for one job; a model is run dry once for each policy of recompute, and each place of a pipeline."""

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
        key = repr(
            (dict(table), plan.recompute, plan.tp, plan.cp, plan.ep, plan.context, plan.pp, plan.schedule, plan.stages, place)
        )
        if key not in self._recordings:
            model = build(table)
            groups = decay_matrices_only(self._settled.job.train.weight_decay)
            rank = place * (plan.size // plan.pp)
            subject = Subject(model.factory, model.loss, self._sample, self.microbatch, self._precision, plan, groups, rank=rank)
            self._recordings[key] = dry_run(subject)
        return self._recordings[key]

    def predict(self, plan: Plan, table: Mapping[str, Any] | None = None) -> Prediction:
        """Of the rank that needs most; a host has what all its ranks need."""
        most = max(self.predict_each(plan, table), key=needed)
        if plan.pp == 1:
            return most
        here, each = self._machine.ranks, plan.size // plan.pp
        hosts = {
            tuple(rank // each for rank in range(first, min(first + here, plan.size))) for first in range(0, plan.size, here)
        }
        fits = [self._fits(plan, table, Counter(places)) for places in hosts]
        return replace(most, fits=tuple(min(column, key=lambda fit: fit.free) for column in zip(*fits, strict=True)))

    def _fits(self, plan: Plan, table: Mapping[str, Any] | None, places: Counter[int]) -> list[Fit]:
        """Of a host with so many ranks of each place of a pipeline."""
        found = [(self._one(plan, table, place, ranks).fits, ranks) for place, ranks in places.items()]
        fits = []
        for column in zip(*(fits for fits, _ in found), strict=True):
            memory, available = column[0].memory, column[0].available
            if memory == DISK:  # each rank has its share of what is free for all of the host
                available = min(fit.available * ranks // places.total() for fit, (_, ranks) in zip(column, found, strict=True))
            fits.append(Fit(memory, (sum if memory == HOST else max)(fit.needed for fit in column), available))
        return fits

    def predict_each(self, plan: Plan, table: Mapping[str, Any] | None = None) -> list[Prediction]:
        """By place in the pipeline."""
        ranks = self._machine.ranks if plan.pp == 1 else min(self._machine.ranks, plan.size // plan.pp)
        return [self._one(plan, table, place, ranks) for place in range(plan.pp)]

    def _one(self, plan: Plan, table: Mapping[str, Any] | None, place: int, ranks: int) -> Prediction:
        recording, machine = self.recording(table or self._settled.job.model, plan, place), replace(self._machine, ranks=ranks)
        return predict(recording, self._optimizer, plan, self._precision, machine, self._microbatches, self._process)

    def largest(self) -> Largest | None:
        """Under the job's own plan; of a pipeline it is not looked for, whose stages would all have to be run dry for each size."""
        job, plan = self._settled.job, self._settled.job.plan
        if plan.pp > 1:
            return None
        found = family(job.model, self._settled.model.values)
        if found is None:
            return None
        even = plan.tp * plan.cp  # heads come out even among the ranks that share them
        size = even * largest(lambda size: self.predict(plan, found.member(even * size)).free)
        if size == 0:
            return Largest(found.rule, None, 0)
        table = found.member(size)
        return Largest(found.rule, table, self.recording(table, plan).num_parameters)
