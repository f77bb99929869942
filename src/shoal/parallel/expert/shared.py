"""Routing of a microbatch whose tokens several ranks share: capacity and balance losses are those of all tokens.

Along cp each rank has its tokens and its own part of the loss. Along tp with sequence parallelism it has its tokens
between the layers, and all ranks have the same loss. So the sums of a balance loss are taken over both axes, and its
gradients are summed over cp only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.comm import Group
from shoal.comm.functional import gather_from, reduce_from, sum_everywhere
from shoal.models.moe import Microbatch, Router
from shoal.parallel.context import Context, Parts
from shoal.parallel.expert.mixtures import Mixture
from shoal.parallel.tensor import Region
from shoal.parallel.tensor.layers import become

PURPOSE = "routing"


class SharedMicrobatch(Microbatch):
    """A microbatch of rows whose tokens are cut by `context` among the ranks along cp, by `region` along tp, or both.

    `group`: all these ranks, tp innermost.
    """

    def __init__(self, group: Group, context: Context | None, region: Region | None) -> None:
        self._all, self._context = group, context
        self._region = region if region is not None and region.sequence else None
        self._parts = Parts(self._region, context)

    @property
    def _group(self) -> Group:
        """The ranks that share the microbatch of the running forward; outside of a step rows are whole along cp."""
        if self._region is not None and not (self._context is not None and self._context.is_open):
            return self._region.group
        return self._all

    def _share(self) -> list[list[tuple[int, int]]]:
        """Returns the tokens of a row that each rank has, as stretches (first, number)."""
        inner = 1 if self._region is None else self._region.size
        return [self._parts.tokens(*divmod(rank, inner)) for rank in range(self._group.size)]

    @staticmethod
    def _number(runs: Sequence[tuple[int, int]]) -> int:
        return sum(number for _, number in runs)

    @property
    def _is_cut(self) -> bool:
        return bool(self._region is not None or (self._context is not None and self._context.is_open))

    def _rows(self, here: int) -> int:
        """Returns the number of rows of the microbatch, given that this rank has `here` of its tokens."""
        if self._region is not None:
            return self._region.rows
        return here // max(1, self._number(self._share()[self._group.rank]))

    def number(self, here: int) -> int:
        return self._rows(here) * sum(map(self._number, self._share())) if self._is_cut else here

    def whole(self, x: Tensor) -> Tensor:
        if not self._is_cut:
            return x
        rows, runs = self._rows(len(x)), self._share()
        lengths = [rows * self._number(each) for each in runs]
        everywhere = gather_from(x.detach(), self._group, 0, lengths, PURPOSE).split(lengths)
        out = x.new_empty(rows, sum(map(self._number, runs)), *x.shape[1:])
        for part, stretches in zip(everywhere, runs, strict=True):
            pieces = part.view(rows, self._number(stretches), *x.shape[1:]).split(
                [number for _, number in stretches], 1
            )
            for piece, (start, number) in zip(pieces, stretches, strict=True):
                out[:, start : start + number] = piece
        return out.flatten(0, 1)

    def own(self, x: Tensor) -> Tensor:
        if not self._is_cut:
            return x
        runs = self._share()
        tokens = sum(map(self._number, runs))
        by_row = x.view(len(x) // tokens, tokens, *x.shape[1:])
        return torch.cat([by_row[:, start : start + number] for start, number in runs[self._group.rank]], 1).flatten(
            0, 1
        )

    def sum(self, x: Tensor) -> Tensor:
        if self._region is not None:
            x = reduce_from(x, self._region.group, PURPOSE)
        if self._context is not None and self._context.is_open:
            x = sum_everywhere(x, self._context.group, PURPOSE)
        return x


class Recorded(nn.Module):
    """A router of `transformers`, which gives (logits [n, E], ..), with the logits of all tokens.

    The model computes its balance loss from these logits.
    """

    _context: Context

    def forward(self, *args: object, **kwargs: object) -> object:
        found = super().forward(*args, **kwargs)
        if not self._context.is_open or not isinstance(found, tuple) or not isinstance(found[0], Tensor):
            return found
        return (gather_from(found[0], self._context.group, 0, purpose=PURPOSE), *found[1:])


def share_routing(
    routers: Sequence[Router], others: Sequence[Mixture], group: Group, context: Context | None, region: Region | None
) -> bool:
    """Lets `routers` see the whole microbatch, and the balance losses of `others` the logits of all tokens.

    Returns whether this covers all of them: the routers of `others` must be those of `transformers`.
    """
    for router in routers:
        router.microbatch = SharedMicrobatch(group, context, region)
    known = [mixture.router for mixture in others if type(mixture.router).__module__.startswith("transformers.")]
    for each in known if context is not None else ():
        assert each is not None and context is not None
        become(each, Recorded, _context=context)
    return len(known) == len(others)
