"""Rank arithmetic on one screen: the coordinates of each rank on pp, dp, cp, tp, and for experts on pp, edp, ep, tp.

Plan(dp=2, tp=2, ep=2)      grid[pp, dp, cp, tp]         experts[pp, edp, ep, tp]: the same ranks, dp x cp = edp x ep
                            0 1    dp 0                  0 1    ep 0
                            2 3    dp 1                  2 3    ep 1
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UserError
from shoal.plan import Plan

AXES = ("pp", "dp", "cp", "tp")
"""Outermost first: ranks with neighbouring numbers differ along the innermost axes, which communicate most."""
EXPERT_AXES = ("pp", "edp", "ep", "tp")
"""The axes of experts over the same ranks: those along `ep` hold different experts, those along `edp` copies of
them."""


PEERS = {
    "samples": ("dp",),
    "replicas": ("dp", "cp"),
    "parts": ("tp",),
    "expert parts": ("ep", "tp"),
    "stage": ("dp", "cp", "tp"),
    "stages": ("pp",),
}
"""The axes along which ranks differ that are peers of a kind.

- samples: they have other samples, of the same weights
- replicas: they have other samples or other tokens, of the same weights
- parts, expert parts: they have other parts of the same matrices; other experts, or parts of these
- stage: they have the same stage of a pipeline, whatever part of it
- stages: they have other stages
"""
ALONG = {
    "dp": "the same weights, other samples",
    "cp": 'the same weights and samples, other tokens of each row (context = "{plan.context}")',
    "tp": "the same samples, other parts of each large matrix",
    "ep": "other experts, to which tokens travel; {copies} rank(s) have the same",
}
"""What ranks along an axis share and divide, for a reader; `copies`: of each expert."""


class Mesh:
    """A grid of ranks, seen from one of them.

    grid: `grid[p, d, c, t]` is the rank at those coordinates, int64 [pp, dp, cp, tp], of numpy.
    experts: the same ranks by the axes of experts, int64 [pp, edp, ep, tp].
    coordinates: this rank's index on each of `AXES`.

    Raises UserError when the plan's degrees do not multiply to the number of ranks.
    """

    def __init__(self, plan: Plan, rank: int, size: int) -> None:
        if plan.size != size:
            product = f"pp {plan.pp} x dp {plan.dp} x cp {plan.cp} x tp {plan.tp} = {plan.size}"
            raise UserError(f"the plan needs {product} ranks, but {size} were started: {_remedy(plan, size)}")
        plan.check_groups()
        self.grid = np.arange(size).reshape(plan.pp, plan.dp, plan.cp, plan.tp)
        self.experts = self.grid.reshape(plan.pp, -1, plan.ep, plan.tp)
        self._shard = plan.shard or plan.dp
        self._at = self.at(rank)
        self.coordinates: tuple[int, ...] = tuple(self._at[axis] for axis in AXES)

    def __repr__(self) -> str:
        places = ", ".join(f"{axis} {self.rank(axis)} of {self.size(axis)}" for axis in AXES if self.size(axis) > 1)
        return f"Mesh({places or 'one rank'})"

    def size(self, axis: str) -> int:
        """Returns the number of ranks along `axis`."""
        axes, grid = self._view((axis,))
        return int(grid.shape[axes.index(axis)])

    def rank(self, axis: str) -> int:
        """Returns this rank's coordinate on `axis`."""
        return self._at[axis]

    def at(self, rank: int) -> dict[str, int]:
        """Returns the coordinates of any rank, on all axes of both grids."""
        found: dict[str, int] = {}
        for axes, grid in ((AXES, self.grid), (EXPERT_AXES, self.experts)):
            rest = rank
            for axis, size in zip(reversed(axes), reversed(grid.shape), strict=True):
                rest, found[axis] = divmod(rest, size)
        return found

    def peers(self, kind: str) -> tuple[str, list[int]]:
        """Returns this rank's peers of a kind (see PEERS), itself included, and a name for their group: its axes,
        without last ones of one rank."""
        axes = PEERS[kind]
        shown = list(axes)
        while len(shown) > 1 and self.size(shown[-1]) == 1:
            shown.pop()
        return "-".join(shown), self.ranks(*axes)

    @property
    def part(self) -> int:
        """A number that ranks have alike which compute the same part of the model, for other samples."""
        return self.ranks("dp")[0] * self.grid.size + self.ranks("edp")[0]

    def ranks(self, *axes: str) -> list[int]:
        """Returns the ranks that differ from this one only along `axes`, ascending, this one included.

        Raises UserError for axes of different grids, such as dp and ep.
        """
        names, grid = self._view(axes)
        return grid[tuple(slice(None) if name in axes else self._at[name] for name in names)].flatten().tolist()

    def shards(self, experts: bool = False) -> tuple[list[int], list[int]]:
        """Returns two lists of ranks along dp and cp: those that share one copy of the state with this rank (neighbours
        in rank number), and those that hold the same part of the other copies.

        experts: asks for the state of experts, among the ranks along edp. Where one copy of the state covers fewer
            ranks than `ep`, an expert's state is not divided, and the first list is this rank alone.
        """
        ranks, each = self.ranks("dp", "cp"), self._shard * self.size("cp")
        if experts:
            ranks, each = self.ranks("edp"), max(1, each // self.size("ep"))
        at = ranks.index(int(self.grid[self.coordinates]))
        start = at - at % each
        return ranks[start : start + each], ranks[at % each :: each]

    @property
    def replica(self) -> int:
        """This rank's place among those that have other samples."""
        return self._at["dp"]

    def standing_for(self, other: int, replica: int) -> int:
        """Returns the rank that has the stage of `other` and this rank's parts and tokens: in this rank's own replica
        where `other` is of it, else in `replica`."""
        place = self.at(other)
        where = {**self._at, "pp": place["pp"], "dp": place["dp"] if place["dp"] == self.replica else replica}
        return int(self.grid[tuple(where[axis] for axis in AXES)])

    def on(self, places: Sequence[int], ranks: Sequence[int]) -> list[int]:
        """Returns the ranks of the stages `places` (indices along pp) whose other coordinates are those of `ranks`."""
        inner = self.grid[0].size
        return sorted(place * inner + each for place in places for each in {rank % inner for rank in ranks})

    def _view(self, axes: tuple[str, ...]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        for names, grid in ((AXES, self.grid), (EXPERT_AXES, self.experts)):
            if set(axes) <= set(names):
                return names, grid
        raise UserError(
            f"{' and '.join(axes)} are not axes of one grid: {', '.join(AXES)}, or of experts {', '.join(EXPERT_AXES)}"
        )


def _remedy(plan: Plan, size: int) -> str:
    """Says which single degree would fit `size` ranks if changed; where none does whatever the model is, also how many
    ranks to start."""
    fits = {}
    for axis in ("dp", "tp", "cp", "pp"):
        degree, rest = divmod(size, plan.size // getattr(plan, axis))
        with suppress(UserError):
            if degree and not rest and replace(plan, **{axis: degree}).size == size:
                fits[axis] = f"{axis} = {degree}"
    whole = [fits.pop(axis) for axis in tuple(fits) if axis == "dp" or fits[axis].endswith("= 1")]
    always = [f"{' or '.join(whole)} works here"] if whole else []
    cut = [f"{' or '.join(fits.values())} of a model that can be cut so"] if fits else []
    inner = plan.size // plan.dp
    copies = max(1, size // inner)
    start = [] if whole else [f"start a multiple of {inner} ranks, such as {copies * inner} with dp = {copies}"]
    return ", or ".join(always + cut + start)
