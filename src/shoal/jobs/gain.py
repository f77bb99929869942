"""What another plan could gain over data parallelism, at most: by that a job that gives no plan is searched, or not.

Data parallelism divides a model's products evenly. What is left for another plan to spare is the rest of its step: the
exchange of gradients, the update that every rank makes of all weights, and the rows by which the largest share exceeds
the mean. Where that is little, beside the products or over the whole job, no answer of the planner would be worth
asking for, and no one is asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from shoal import units
from shoal.errors import in_section
from shoal.exchange.algorithm import USUAL_CHUNK
from shoal.jobs.choose import Settled, microbatches_of
from shoal.jobs.costs import flops_per_sample
from shoal.jobs.optimizers import optimizer_named
from shoal.models import ModelSpec
from shoal.module.build import without_values
from shoal.planner.ask import numbers_of
from shoal.planner.cluster import Link
from shoal.planner.measure import rates
from shoal.planner.task import Numbers
from shoal.precision import precision

SMALL = 1 / 4
"""Share of a rank's memory that a job's state may take to be planned without a search."""
SHARE = 0.1
"""What another plan has to spare, over the time of the products: predictions are off by as much."""
WORTH = 10.0
"""Seconds that a whole job must be able to gain. A search takes about one, where the model was not traced before."""
FINEST = 1e-3
"""Seconds of a step: what is less is no more than ranks wait for each other by chance."""
SLOWEST = 5e9, 4e9
"""Operations and bytes a second that any device reaches, before it was measured."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a job: how many, the device of one, bytes that are free for it, and their link."""

    number: int
    device: torch.device
    memory: int
    link: Link


def why_not_searched(settled: Settled, ranks: Ranks) -> str | None:
    """Why data parallelism stays without a search, in words; None where the planner is to be asked. The device is
    measured where a job is long enough for that to matter."""
    elements = None if settled.model.values.get("weights") else elements_of(settled.model)
    if elements is None:
        return "how large the model is shows only with its weights"
    if not is_small(settled, ranks.memory):
        return None
    if ranks.number == 1:
        return "its memory is enough"
    numbers = numbers_of_job(settled)
    uneven = _largest_share(settled) - settled.job.train.global_batch / ranks.number
    for measured in (False, True):
        peak, bandwidth = _reached(ranks.device, numbers.dtype) if measured else SLOWEST
        row = _flops(settled) / peak if uneven or measured else 0.0
        spared = uneven * row + _beside(elements, numbers, ranks, bandwidth)
        products = settled.job.train.global_batch / ranks.number * row
        if spared <= FINEST:
            return f"another plan could spare at most {units.duration(spared)} of a step"
        whole = _whole(settled, spared, products if measured else None)
        if whole <= WORTH:
            return f"another plan could spare at most {units.duration(whole)} of the whole job"
    if spared <= SHARE * products:
        return f"all but the products is at most {spared / products:.1%} of them"
    return None


def is_small(settled: Settled, memory: int) -> bool:
    """Whether all of the state of the job's model is a small share of a rank's memory. A model whose size is not known
    without its weights counts as small."""
    elements = None if settled.model.values.get("weights") else elements_of(settled.model)
    if elements is None:
        return True
    each = numbers_of_job(settled)
    return elements * (each.weight + each.gradient + each.master + each.state) <= SMALL * memory


def _reached(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Operations and bytes a second that were measured of `device`."""
    found = rates(device, dtype)
    return found.peak(dtype), found.bandwidth


def _beside(elements: int, numbers: Numbers, ranks: Ranks, bandwidth: float) -> float:
    """Seconds of a step for the exchange of all gradients, hidden by nothing, and for the update. Under any plan ranks
    meet once a step, for the latency of a chunk."""
    gradients = elements * numbers.gradient
    exchange = ranks.link.seconds("all_reduce", gradients, ranks.number, gradients // USUAL_CHUNK)
    each = numbers.gradient + 2 * (numbers.master or numbers.weight) + 2 * numbers.state + numbers.weight
    return exchange + elements * each / bandwidth


def _whole(settled: Settled, spared: float, products: float | None) -> float:
    """Seconds of a whole job, of each step of which so many could be spared."""
    seconds = settled.job.train.seconds
    limits = [math.inf] if settled.total is None else [settled.total * spared]
    if seconds is not None:
        limits.append(seconds if products is None else seconds * spared / (spared + products))
    return min(limits)


def _largest_share(settled: Settled) -> int:
    """Rows of a step on the rank that has most."""
    rows, number = microbatches_of(settled.job)
    return min(rows * number, settled.job.train.global_batch)


def _flops(settled: Settled) -> float:
    """Counts those of forward and backward of a row."""
    rows = settled.model.prepare_data(settled.data.train)
    return flops_per_sample(settled.model, rows, settled.job.data.sequence) or 0.0


def numbers_of_job(settled: Settled) -> Numbers:
    """Bytes of an element in each role."""
    train = settled.job.train
    with in_section("train"):
        numbers = precision(train.precision)
    return numbers_of(numbers, optimizer_named(train.optimizer, train.lr))


_ELEMENTS: dict[str, int | None] = {}


def elements_of(model: ModelSpec) -> int | None:
    """The number of a model's parameters; None where it cannot be made without values."""
    key = repr((model.name, model.values))
    if key not in _ELEMENTS:
        module = without_values(model.factory)
        _ELEMENTS[key] = None if module is None else sum(parameter.numel() for parameter in module.parameters())
    return _ELEMENTS[key]
