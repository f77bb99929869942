"""Where the ranks along one axis cut the operations of a model: the placements that take the least time, found exactly.

Each operation of the trace that `parallel.tensor` reads is a variable whose choices are its strategies; so is each
tensor that several operations use, whose choice says how it lies for them, so that it is gathered once and its
gradients are summed once. An operation costs what it computes; between two that want a tensor differently it is
redistributed by the cheapest route (`parallel.route`), and backward brings the gradient back between the dual
placements. Weights lie as the operation wants them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np
import torch

from shoal.parallel.placement import Placement
from shoal.parallel.route import Question, route, sent
from shoal.parallel.tensor.graph.strategies import Lies
from shoal.planner.cluster import Device, Link
from shoal.planner.computing import ATTENTION_REACHES
from shoal.planner.elimination import Costs, cheapest

_AXIS = "tp"
DEAREST, HALVINGS = 1.0, 30
"""Seconds that a byte of parameters is worth at most; how often that is halved."""


@dataclass(frozen=True)
class Rates:
    """What the ranks reach.

    ranks, link: how many, and the link between any two
    itemsize: bytes of an element of what a model computes with
    products, streams: operations a second of products, and bytes a second of all else, that a device reaches
    launch: seconds of an operation at least; `in_turn`: it comes beside the work
    microbatches: of a step, at whose end gradients of parameters are summed up, many at a time
    """

    ranks: int
    link: Link
    itemsize: int
    products: float
    streams: float
    launch: float
    in_turn: bool
    microbatches: int = 1

    @classmethod
    def of(
        cls, ranks: int, link: Link, device: Device, dtype: torch.dtype, microbatches: int = 1, rounded: str = ""
    ) -> Rates:
        """The rates of ranks with this device that compute in `dtype`, with factors `rounded` to another format."""
        reached = device.peak(dtype, rounded) * device.reaches
        streams = device.bandwidth * device.streams
        return cls(ranks, link, dtype.itemsize, reached, streams, device.launch, device.on_host, microbatches)

    def seconds(self, operation: str, axes: tuple[str, ...], sent: float) -> float:
        """Seconds of a collective, each rank of which sends `sent` bytes."""
        return self.link.latency * self.link.rounds(operation, self.ranks) + sent / self.link.bandwidth

    @cached_property
    def at_the_end(self) -> Rates:
        """The rates of what is sent together with much else: without latency."""
        return replace(self, link=replace(self.link, latency=0.0))

    def copied(self, nbytes: float) -> float:
        """Seconds to read and write so much."""
        return 2 * nbytes / self.streams

    def computed(self, products: float, attention: float, touched: float) -> float:
        """Seconds of so many operations of products and attention, and bytes of all else."""
        work = products / self.products + attention / (self.products * ATTENTION_REACHES) + touched / self.streams
        if not work:
            return 0.0
        return work + self.launch if self.in_turn else max(work, self.launch)


@cache
def redistributed(nbytes: int, source: Lies, target: Lies, rates: Rates) -> float:
    """Seconds to bring a tensor of `nbytes` bytes from one placement to another, by the cheapest route."""
    if source == target:
        return 0.0
    # two cuts of it are two dims of a tensor that is as large
    elements = max(1, nbytes // rates.itemsize)
    shape = (rates.ranks, rates.ranks, -(-elements // rates.ranks**2))
    question = Question(shape, rates.itemsize, ((_AXIS, rates.ranks),))
    first, second = (
        Placement.of(3, {} if each.what != "cut" else {dim: _AXIS}, _AXIS if each.what == "sum" else "")
        for each, dim in ((source, 0), (target, 1 if source.what == "cut" else 0))
    )
    seconds, at = 0.0, first
    for step in route(question, first, second, rates):
        seconds += rates.copied(question.nbytes(step.placement))
        if step.operation not in ("slice", "lift", "spread"):
            seconds += rates.seconds(step.operation, step.axes, sent(question, at, step))
        at = step.placement
    return seconds


@dataclass
class Problem:
    """The variables, by place: those of operations first. `names`: what each choice is called.

    alone: seconds of each choice by itself; `weights`: bytes of parameters that a rank then has
    pairs: seconds of what two variables need of each other
    layers: the place of each layer's product, by the layer's name
    """

    alone: list[Costs] = field(default_factory=list)
    weights: list[Costs] = field(default_factory=list)
    pairs: dict[tuple[int, int], Costs] = field(default_factory=dict)
    names: list[list[str]] = field(default_factory=list)
    layers: dict[str, int] = field(default_factory=dict)

    def add(self, choices: int, names: Sequence[str] = ()) -> int:
        """Adds a variable; returns its place."""
        self.alone.append(np.zeros(choices))
        self.weights.append(np.zeros(choices))
        self.names.append(list(names))
        return len(self.alone) - 1

    def pay(self, one: int, other: int, costs: Costs) -> None:
        """Adds costs of two variables."""
        key, costs = ((one, other), costs) if one < other else ((other, one), costs.T)
        self.pairs[key] = self.pairs[key] + costs if key in self.pairs else costs


@dataclass(frozen=True)
class Placed:
    """Placements: the choice of each variable; their seconds of a microbatch, forward and backward, and bytes of
    parameters of a rank; `layers`: what each layer's product is, by its name."""

    chosen: tuple[int, ...]
    seconds: float
    weights: float
    layers: Mapping[str, str]


def best(
    problem: Problem,
    fixed: Mapping[str, str] | None = None,
    without: Collection[str] = (),
    limit: float | None = None,
    price: float = 0.0,
) -> Placed:
    """Returns the placements that take the least time.

    fixed: what some layers' products are to be, by names; `without`: names of choices that are left out
    limit: bytes of parameters that a rank may have. The seconds that a byte is worth are found by halving, so what is
        returned is the best of all that need no more than it does itself
    price: seconds that a byte costs besides

    Raises ValueError for a product that cannot be so, and where nothing keeps to the limit.
    """
    alone = [seconds + price * weights for seconds, weights in zip(problem.alone, problem.weights, strict=True)]
    if without:
        alone = [
            np.where([each in without for each in names], np.inf, costs) if names else costs
            for names, costs in zip(problem.names, alone, strict=True)
        ]
    for name, what in (fixed or {}).items():
        place = problem.layers[name]
        here = np.array([each == what for each in problem.names[place]])
        if not here.any():
            raise ValueError(f"{name} may be {', '.join(dict.fromkeys(problem.names[place]))}, not {what}")
        alone[place] = np.where(here, alone[place], np.inf)
    placed = _placed(problem, cheapest(alone, problem.pairs)[0])
    if limit is None or placed.weights <= limit:
        return placed
    low, high = 0.0, 1e-15
    while (placed := best(problem, fixed, without, price=high)).weights > limit:
        low, high = high, 8 * high
        if high > DEAREST:
            raise ValueError(
                f"no placements leave a rank {limit:.4g} bytes of parameters, the least is {placed.weights:.4g}"
            )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        other = best(problem, fixed, without, price=middle)
        if other.weights <= limit:
            placed, high = other, middle
        else:
            low = middle
    return placed


def _placed(problem: Problem, chosen: list[int]) -> Placed:
    seconds = sum(float(costs[at]) for costs, at in zip(problem.alone, chosen, strict=True))
    seconds += sum(float(costs[chosen[one], chosen[other]]) for (one, other), costs in problem.pairs.items())
    weights = sum(float(each[at]) for each, at in zip(problem.weights, chosen, strict=True))
    layers = {name: problem.names[place][chosen[place]] for name, place in problem.layers.items()}
    return Placed(tuple(chosen), seconds, weights, layers)
