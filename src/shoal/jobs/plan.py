"""Asks the planner for a job file: the memory it will need, and the largest model of its family that would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from shoal.device import any_device, free_memory
from shoal.jobs.choose import Settled, Sizes, settle, with_plan
from shoal.jobs.config import Auto
from shoal.jobs.forecast import Forecast, Largest
from shoal.jobs.lazy_dynamo import bytes_to_come
from shoal.jobs.plans import plan_at
from shoal.jobs.ranks import ranks_here
from shoal.jobs.read import load_job
from shoal.parallel.tensor import CutLayers
from shoal.planner import (
    Machine,
    Prediction,
    others,
    that_fit,
)
from shoal.report.memory import read_memory


@dataclass(frozen=True)
class Answer:
    """The planner's answer for a job.

    parameters, microbatch: number of parameters of the model, of samples in a microbatch.
    prediction: of the rank that needs most.
    instead: where the job does not fit, plans that do, or else the one that lacks least.
    stages: in a pipeline, a prediction for each rank along pp.
    layers: how plan.tp and plan.ep divide each layer.
    auto: how far the plan is the planner's, which is not asked for this.
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
    auto: Auto = field(default_factory=Auto)

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
    process: bytes of an interpreter with torch; by default of this process, with what one that trains imports besides.

    Raises UserError for an invalid job.
    """
    job, origins = load_job(path, assignments)
    on_host = ranks_here(job)
    sizes = Sizes(max(on_host, job.plan.size), on_host)
    settled = settle(replace(job, auto=Auto()), origins, sizes)  # nobody is asked: it has to give a whole plan
    machine = machine_here(on_host)
    machine = replace(machine, device=device or machine.device, host=host or machine.host)
    if process is None:
        process = read_memory(torch.device("cpu")).bytes + bytes_to_come()
    forecast = Forecast(settled, machine, process)
    plan = settled.job.plan
    prediction = forecast.predict(plan)
    instead = that_fit(others(plan), forecast.predict) if prediction.free < 0 else []
    recording = forecast.recording(plan)
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
        auto=job.auto,
    )
