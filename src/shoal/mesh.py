"""Rank arithmetic on one screen: which rank stands where on the axes pp, dp, cp, tp."""

from __future__ import annotations

import torch

from shoal.errors import UserError
from shoal.plan import Plan

AXES = ("pp", "dp", "cp", "tp")
"""Outermost first: neighbours in rank number share the innermost axes, which talk most."""


class Mesh:
    """A grid of ranks; `grid[p, d, c, t]` is the rank at those coordinates.

    Raises UserError when the plan's degrees do not multiply to the number of ranks.
    """

    def __init__(self, plan: Plan, rank: int, size: int) -> None:
        if plan.size != size:
            inner = plan.pp * plan.cp * plan.tp
            remedy = f"dp = {size // inner} works here" if size % inner == 0 else f"start a multiple of {inner} ranks"
            product = f"pp {plan.pp} x dp {plan.dp} x cp {plan.cp} x tp {plan.tp} = {plan.size}"
            raise UserError(f"the plan needs {product} ranks, but {size} were started: {remedy}")
        self.grid = torch.arange(size).view(plan.pp, plan.dp, plan.cp, plan.tp)
        self._shard = plan.shard or plan.dp
        self.coordinates: tuple[int, ...] = tuple((self.grid == rank).nonzero().flatten().tolist())

    def size(self, axis: str) -> int:
        """How many ranks stand along `axis`."""
        return self.grid.size(AXES.index(axis))

    def rank(self, axis: str) -> int:
        """This rank's coordinate on `axis`."""
        return self.coordinates[AXES.index(axis)]

    def ranks(self, axis: str) -> list[int]:
        """The ranks that differ from this one along `axis` only, in order, this one included."""
        index = tuple(slice(None) if name == axis else at for name, at in zip(AXES, self.coordinates, strict=True))
        return self.grid[index].tolist()

    def shards(self) -> tuple[list[int], list[int]]:
        """The data-parallel ranks that share one copy of the state with this one, neighbours, and those that keep the same part of other copies."""
        ranks, at = self.ranks("dp"), self.rank("dp")
        start = at - at % self._shard
        return ranks[start : start + self._shard], ranks[at % self._shard :: self._shard]
