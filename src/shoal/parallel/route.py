"""Finds the cheapest route from one placement of a tensor to another: a shortest path whose edges are single
collectives, weighted by what they cost on these links.

    all_gather      [.., a b, ..]  ->  [.., a, ..]    the innermost cut of a dim is joined
    slice           [.., a, ..]    ->  [.., a b, ..]  a dim is cut once more, by an axis along which ranks held
                                                      the same: free
    all_to_all      [.. b, .. ]    ->  [.., .. b]     the innermost cut moves to another dim
    permute         [a b]          ->  [b a]          the cuts of a dim in another order: each rank hands its piece
                                                      to one other
    all_reduce      + a b          ->  + b            summands along one or more axes are added up
    reduce_scatter  + a            ->  [.. a]         summands are added up, and a dim is cut by that axis
    lift                           ->  + a            the first rank keeps its values, the others have zeros: free
    spread          [.. a]         ->  + a            each rank has its piece among zeros: free
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, count, permutations
from math import prod
from typing import Protocol

from shoal.comm.transport import sent_bytes
from shoal.parallel.placement import Placement

MEMORY_RATE = 1e10
"""Bytes per second assumed for a copy within a rank; it decides between routes that send equally much."""


class Costs(Protocol):
    """The cost of collectives. It must be equal on all ranks, which would choose different routes otherwise."""

    def seconds(self, operation: str, axes: tuple[str, ...], sent: float) -> float:
        """Seconds of a collective over the ranks along `axes`, each of which sends `sent` bytes."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class AxisCosts:
    """A linear cost for each axis: `latency[axis]` seconds per collective and `rate[axis]` bytes per second.

    A collective over several axes has the latency and the rate of the slowest.
    """

    latency: Mapping[str, float]
    rate: Mapping[str, float]

    def __hash__(self) -> int:
        return hash((frozenset(self.latency.items()), frozenset(self.rate.items())))

    def seconds(self, operation: str, axes: tuple[str, ...], sent: float) -> float:
        return max(self.latency[axis] for axis in axes) + sent / min(self.rate[axis] for axis in axes)


@dataclass(frozen=True)
class Step:
    """One edge of the route: `operation` over `axes` makes `placement`.

    dim: the dim that it joins or cuts; -1 if it changes none
    to_dim: of an all_to_all the dim that is cut by it
    """

    operation: str
    axes: tuple[str, ...]
    placement: Placement
    dim: int = -1
    to_dim: int = -1

    def __str__(self) -> str:
        return f"{self.operation} {' '.join(self.axes)} -> {self.placement}"


@dataclass(frozen=True)
class Question:
    """A tensor of global `shape` with elements of `itemsize` bytes, on a mesh with `sizes` (axis, ranks along it)."""

    shape: tuple[int, ...]
    itemsize: int
    sizes: tuple[tuple[str, int], ...]

    def nbytes(self, placement: Placement) -> int:
        """Returns the bytes of the largest piece."""
        return prod(placement.largest(self.shape, dict(self.sizes))) * self.itemsize


def steps_from(question: Question, placement: Placement, wanted: frozenset[str]) -> Iterator[Step]:
    """Yields the edges that leave `placement`.

    Summands are made along the axes `wanted` only: sums with zeros can be short routes too, but would change the sign
    of a zero.
    """
    sizes = dict(question.sizes)
    spare = [axis for axis in sizes if axis not in placement.axes]
    for dim, cuts in enumerate(placement.dims):
        if cuts:
            joined = placement.joined(dim)
            yield Step("all_gather", cuts[-1:], joined, dim)
            if cuts[-1] in wanted:
                yield Step("spread", cuts[-1:], joined.summands(frozenset(cuts[-1:])), dim)
            for to_dim in range(len(placement.dims)):
                if to_dim != dim:
                    yield Step("all_to_all", cuts[-1:], joined.cut(to_dim, cuts[-1]), dim, to_dim)
        if len(cuts) > 1 and question.shape[dim] % prod(sizes[axis] for axis in cuts) == 0:
            for order in permutations(cuts):
                if order != cuts:
                    dims = (*placement.dims[:dim], order, *placement.dims[dim + 1 :])
                    yield Step("permute", cuts, Placement(dims, placement.partial), dim)
        for axis in spare:
            yield Step("slice", (axis,), placement.cut(dim, axis), dim)
        for axis in sorted(placement.partial):
            yield Step("reduce_scatter", (axis,), placement.summed(frozenset((axis,))).cut(dim, axis), dim)
    partial = sorted(placement.partial)
    for number in range(1, len(partial) + 1):
        for axes in combinations(partial, number):
            yield Step("all_reduce", axes, placement.summed(frozenset(axes)))
    for axis in filter(wanted.__contains__, spare):
        yield Step("lift", (axis,), placement.summands(frozenset((axis,))))


def sent(question: Question, before: Placement, step: Step) -> int:
    """Returns the bytes that a rank sends in `step`, which leads away from the placement `before`."""
    sizes = dict(question.sizes)
    ranks = prod(sizes[axis] for axis in step.axes)
    now, then = question.nbytes(before), question.nbytes(step.placement)
    match step.operation:
        case "all_reduce" | "all_to_all":
            return sent_bytes(step.operation, now, ranks)
        case "reduce_scatter":
            return sent_bytes(step.operation, ranks * then, ranks)
        case "all_gather":
            return sent_bytes(step.operation, ranks * now, ranks)
        case "permute":
            return now
    return 0


def seconds(question: Question, before: Placement, step: Step, costs: Costs) -> float:
    """Returns the seconds that `step` takes: the transfer over the links, and a copy of the result."""
    beside = question.nbytes(step.placement) / MEMORY_RATE
    if step.operation in ("slice", "lift", "spread"):
        return beside
    return beside + costs.seconds(step.operation, step.axes, sent(question, before, step))


@lru_cache(maxsize=4096)
def route(question: Question, source: Placement, target: Placement, costs: Costs) -> tuple[Step, ...]:
    """Returns the steps from `source` to `target` that take the least time together (Dijkstra's); none if they are
    equal.

    Raises ValueError for placements of another number of dims, or with axes that the mesh does not have.
    """
    for placement in (source, target):
        if len(placement.dims) != len(question.shape) or not placement.axes <= {axis for axis, _ in question.sizes}:
            raise ValueError(
                f"{placement} does not fit a tensor of shape {question.shape} on the axes {question.sizes}"
            )
    order = count()  # of equal routes the one with fewer steps, then the first found: all ranks agree
    heap: list[tuple[float, int, int, Placement, tuple[Step, ...]]] = [(0.0, 0, next(order), source, ())]
    done: set[Placement] = set()
    while heap:
        so_far, number, _, at, steps = heapq.heappop(heap)
        if at == target:
            return steps
        if at in done:
            continue
        done.add(at)
        for step in steps_from(question, at, target.partial):
            if step.placement not in done:
                cost = so_far + seconds(question, at, step, costs)
                heapq.heappush(heap, (cost, number + 1, next(order), step.placement, (*steps, step)))
    raise AssertionError("every placement can be joined and summed up, and any made of that")
