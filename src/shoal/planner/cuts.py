"""The stages into which a model is cut, and what each consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise

from shoal.planner.balance import cut
from shoal.planner.costs import Prices
from shoal.planner.degrees import Spread
from shoal.planner.knapsack import Counts
from shoal.planner.pipes import Places
from shoal.planner.sizes import Sizes, together
from shoal.planner.task import Task

Blocks = tuple[tuple[int, tuple[int, ...]], ...]
"""The kinds of blocks of a stage: a piece that has one, and the numbers of those in the stage among all blocks."""


@dataclass(frozen=True, eq=False)
class Cuts:
    """`numbers` of pieces of each stage, and on which ranks stages are; the distinct pieces with how many there are,
    the sizes, the blocks of each. `alike`: the ranks of a pipeline that hold as much as each other. One object for each
    of these (see Timed)."""

    numbers: tuple[int, ...]
    ranks: Places
    pieces: tuple[tuple[tuple[int, int], ...], ...]
    sizes: tuple[Sizes, ...]
    blocks: tuple[Blocks, ...]
    alike: tuple[tuple[int, ...], ...]

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the pieces that have its kinds of blocks."""
        return tuple(tuple(place for place, _ in blocks) for blocks in self.blocks)

    @cached_property
    def all_by(self) -> Callable[[tuple[str, ...], str], tuple[Counts, ...]]:
        """Counts of all stages where every block is treated in one of several ways."""
        return cache(self._all_by)

    def _all_by(self, policies: tuple[str, ...], policy: str) -> tuple[Counts, ...]:
        return tuple(
            tuple(tuple(len(numbers) * (each == policy) for each in policies) for _, numbers in blocks)
            for blocks in self.blocks
        )


def fastest(prices: Prices, spread: Spread, places: Places, rows: float) -> tuple[int, ...]:
    """The numbers of pieces of the stages at `places`, such that the slowest rank takes as little as can be for a
    microbatch of `rows` rows; as pinned, where that is."""
    if (stages := sum(map(len, places))) == 1:
        return (len(prices.pieces),)
    if given := _pinned(prices.task, stages):
        return given
    return tuple(cut(_costs(prices, spread, rows), prices.speeds(spread, rows), places))


def _pinned(task: Task, stages: int) -> tuple[int, ...]:
    """The numbers of pieces of `stages` that a pin says; nothing where none does."""
    given = task.pins.get("stages")
    if isinstance(given, list) and len(given) == stages and all(isinstance(each, int) for each in given):
        return tuple(given)
    return ()


def _costs(prices: Prices, spread: Spread, rows: float) -> list[float]:
    """Seconds of a microbatch of each piece of the model (see `alone`)."""
    distinct = {place: alone(prices, place, spread, rows) for place in set(prices.like)}
    return [distinct[place] for place in prices.like]


def cut_at(prices: Prices, spread: Spread, numbers: tuple[int, ...], ranks: Places) -> Cuts:
    """The stages with these numbers of pieces, each on its rank."""
    places = [range(*each) for each in pairwise([0, *accumulate(numbers)])]
    pieces = tuple(map(prices.alike, places))
    sizes = tuple(together([(prices.sizes(place, spread), many) for place, many in stage]) for stage in pieces)
    alike = dict[object, list[int]]()
    for rank, own in enumerate(ranks):
        alike.setdefault((*(pieces[stage] for stage in own), own[-1] == len(numbers) - 1), []).append(rank)
    return Cuts(numbers, ranks, pieces, sizes, tuple(map(prices.blocks, places)), tuple(map(tuple, alike.values())))


def alone(prices: Prices, place: int, spread: Spread, rows: float, sending: float = 1.0) -> float:
    """Seconds of a microbatch of a piece, there and back, without recompute, and `sending` times what is sent."""
    spent = prices.spent(place, spread, rows)
    sent = sum(seconds for _, seconds in (*spent.sent_forward, *spent.sent_backward))
    return spent.forward + spent.backward + sending * sent
