"""How many microbatches each replica of a model has: as many as the others, or, where their devices differ in speed, so
that the one which takes longest takes as little as can be, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from shoal.assembly.compatibility import Exchange
from shoal.data.cursor import in_shares
from shoal.exchange.named import algorithm
from shoal.plan import Plan
from shoal.planner.costs import Prices
from shoal.planner.degrees import Spread


@dataclass(frozen=True)
class Replicas:
    """The replicas of a plan by the `speeds` of their devices along the pipeline, relative to the slowest device:
    those that are alike have the same index in `kinds`, the slowest is first."""

    speeds: tuple[tuple[float, ...], ...]
    kinds: tuple[int, ...]

    @property
    def capacity(self) -> float:
        """The speed of all devices together."""
        return math.fsum(sum(self.speeds[kind]) for kind in self.kinds) if len(self.speeds) > 1 else 0.0


class Dealt(NamedTuple):
    """`number` of microbatches on the replica that takes longest, which is of the kind `slowest`; the `most` that a
    replica has; `shares` of the replicas, empty where all have as many."""

    number: int
    slowest: int
    most: int
    shares: tuple[float, ...]


def replicas_of(prices: Prices, spread: Spread, rows: float) -> Replicas:
    """The replicas of `spread` with microbatches of so many rows."""
    even = tuple(prices.speeds(spread, rows))
    hosts = prices.speeds_of_hosts(spread, rows)
    if len(set(hosts)) == 1:
        return Replicas((even,), (0,) * spread.copies)
    ranks = np.repeat(np.array(hosts), prices.task.cluster.per_host)
    own = ranks.reshape(spread.stages, spread.copies, spread.tokens * spread.parts).min(axis=2).T
    kinds = sorted({tuple(row) for row in own.tolist()}, key=lambda row: (min(row), row))
    places = {row: place for place, row in enumerate(kinds)}
    return Replicas(tuple(kinds), tuple(places[tuple(row)] for row in own.tolist()))


def count_alike(plan: Plan, make: Callable[[], torch.optim.Optimizer] | None) -> bool:
    """Whether replicas count alike in the exchange of a plan that is taken, so that all have as many samples. `make`:
    as of `check_exchange`."""
    its = algorithm(plan.exchange)
    if make is not None:
        its.suits(make)
    return Exchange(plan, its, "whole", None, False).weighs_alike


def dealt(
    number: int,
    paces: Sequence[tuple[float, float]],
    replicas: Replicas,
    pinned: tuple[float, ...] = (),
    together: bool = False,
    evenly: bool = False,
) -> Dealt:
    """Deals `number` microbatches to `replicas`. `paces`: of each kind the seconds of one more microbatch, and those
    that come once. `pinned`: shares that are given; `together`: all run as many as the one with most; `evenly`: they
    have as many whatever their devices."""
    kinds = replicas.kinds
    if len(paces) == 1 and not pinned:
        most = math.ceil(number / len(kinds))
        return Dealt(most, 0, most, ())
    even = tuple(in_shares(number, pinned or (1,) * len(kinds)))
    if together or pinned or evenly:
        most = max(even)
        slowest = max(
            range(len(kinds)), key=lambda place: _seconds(most if together else even[place], paces[kinds[place]])
        )
        return Dealt(most if together else even[slowest], kinds[slowest], most, pinned)
    each = _fastest(number, paces, kinds)
    slowest = max(range(len(kinds)), key=lambda place: _seconds(each[place], paces[kinds[place]]))
    common = math.gcd(*each)
    shares = () if len(set(each)) == 1 or tuple(each) == even else tuple(own // common for own in each)
    return Dealt(each[slowest], kinds[slowest], max(each), shares)


def _seconds(number: int, pace: tuple[float, float]) -> float:
    return number * pace[0] + pace[1] if number else 0.0


def _fastest(number: int, paces: Sequence[tuple[float, float]], kinds: Sequence[int]) -> list[int]:
    """How many each replica has: the least bound is found by bisection over the times at which one of them could
    finish; what fits below it and is too much is taken from the last ones of the kind that would end last."""
    many = [kinds.count(kind) for kind in range(len(paces))]

    def within(bound: float) -> list[int]:
        return [max(0, math.floor((bound - once) / pace * (1 + 1e-12))) for pace, once in paces]

    low, high = 0.0, max(_seconds(number, pace) for pace in paces)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(map(int.__mul__, within(middle), many)) >= number:
            high = middle
        else:
            low = middle
        if high - low <= 1e-13 * high:
            break
    most = within(high)
    each = [most[kind] for kind in kinds]
    for place in sorted(range(len(kinds)), key=lambda place: (-_seconds(each[place], paces[kinds[place]]), -place)):
        if sum(each) > number:
            each[place] -= 1
    return each
