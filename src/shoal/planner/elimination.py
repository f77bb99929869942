"""The choice of one value for each variable that has the smallest sum of costs, found exactly by eliminating one
variable after the other.

Costs are tables over one or two variables. A variable that is eliminated leaves a table over its neighbours, with the
best that it can do for each of their choices; the one with fewest neighbours goes first. Graphs of models are narrow:
of a chain of blocks with residual sums no table has more than three variables, so the time is linear in their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
LARGEST = 1 << 24
"""Entries of a table at most."""


class TooWide(Exception):
    """The graph is no narrow one: some table would have more than `LARGEST` entries."""


def cheapest(alone: Sequence[Costs], pairs: Mapping[tuple[int, int], Costs]) -> tuple[list[int], float]:
    """Returns the choice of each variable, and the sum of its costs; of equal ones always the same.

    alone: costs of the choices of each variable
    pairs: costs [choices of the first, choices of the second] of pairs of variables

    Raises TooWide.
    """
    tables: dict[int, tuple[tuple[int, ...], Costs]] = {}
    of: list[set[int]] = [set() for _ in alone]
    made = 0
    for variables, costs in [*(((place,), each) for place, each in enumerate(alone)), *pairs.items()]:
        tables[made] = tuple(variables), costs
        for each in variables:
            of[each].add(made)
        made += 1
    near = [{other for table in mine for other in tables[table][0]} - {place} for place, mine in enumerate(of)]
    left, order = set(range(len(alone))), []
    while left:
        place = min(left, key=lambda each: (len(near[each]), each))
        left.discard(place)
        beside = tuple(sorted(near[place]))
        variables = (*beside, place)
        if prod(len(alone[each]) for each in variables) > LARGEST:
            raise TooWide
        costs = np.zeros([len(alone[each]) for each in variables])
        for table in sorted(of[place]):
            costs = costs + _spread(*tables[table], variables)
            for each in tables.pop(table)[0]:
                of[each].discard(table)
        order.append((place, beside, np.argmin(costs, axis=-1)))
        tables[made] = beside, np.min(costs, axis=-1)
        for each in beside:
            of[each].add(made)
            near[each] |= set(beside) - {each}
            near[each].discard(place)
        made += 1
    chosen = [0] * len(alone)
    for place, beside, best in reversed(order):
        chosen[place] = int(best[tuple(chosen[each] for each in beside)])
    return chosen, float(sum(float(costs) for _, costs in tables.values()))


def _spread(variables: tuple[int, ...], costs: Costs, over: tuple[int, ...]) -> Costs:
    """Returns a table as one over more variables, along which it is the same."""
    order = sorted(range(len(variables)), key=lambda at: over.index(variables[at]))
    shape = [costs.shape[variables.index(each)] if each in variables else 1 for each in over]
    return costs.transpose(order).reshape(shape)
