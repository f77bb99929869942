"""Moves a tensor from one placement to another, by the cheapest way (see route); autograd passes through it.

A redistribution changes no value of the tensor as a whole, so its derivative is one too: of the gradient, between the dual placements. Summands
have the gradient of the sum; a cut tensor's gradient is cut. Where the result is the same on all ranks of some axes and each uses it for
something else, the gradient comes back as summands: `summed` names those axes (Megatron-LM's f is R -> R with summed = {tp}).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm import Group
from shoal.parallel.placement import Placement, extent, longest, piece
from shoal.parallel.route import Costs, Question, Step, route

PURPOSE = "redistribute"


class Axes(Protocol):
    """A mesh with its groups: `mesh.Mesh` and a `World`."""

    def size(self, axis: str) -> int: ...
    def rank(self, axis: str) -> int: ...
    def group(self, *axes: str) -> Group:
        """Of the ranks that differ from this one along `axes` only, in the mesh's order."""

    def names(self) -> tuple[str, ...]: ...


class Redistribution:
    """From `source` to `target`, of a tensor whose whole shape is `shape`, as planned for the elements' size at each call."""

    def __init__(
        self,
        shape: tuple[int, ...],
        source: Placement,
        target: Placement,
        axes: Axes,
        costs: Costs,
        summed: frozenset[str] = frozenset(),
    ) -> None:
        if not summed <= set(axes.names()) - target.axes:
            raise ValueError(f"summed = {sorted(summed)}: the result, {target}, is not the same along these axes")
        self.shape, self.source, self.target = tuple(shape), source, target
        self.axes, self.costs, self.summed = axes, costs, summed
        self.sizes = {axis: axes.size(axis) for axis in axes.names()}
        self.at = {axis: axes.rank(axis) for axis in axes.names()}

    def derivative(self) -> Redistribution:
        """The same for gradients: from where they come to where they are wanted."""
        source, target = self.target.dual(self.summed), self.source.dual()
        return Redistribution(self.shape, source, target, self.axes, self.costs)

    def steps(self, itemsize: int) -> tuple[Step, ...]:
        """The way that it takes for elements of `itemsize` bytes."""
        return route(Question(self.shape, itemsize, tuple(self.sizes.items())), self.source, self.target, self.costs)

    def __call__(self, local: Tensor) -> Tensor:
        """This rank's piece of the target of its piece `local` of the source; memory of its own. ValueError if that has another shape."""
        here = self.source.box(self.shape, self.sizes, self.at).sizes
        if tuple(local.shape) != here:
            raise ValueError(
                f"a piece of shape {tuple(local.shape)}: of {self.shape} placed as {self.source} this rank holds {here}"
            )
        return _Redistribute.apply(local, self)

    @torch.no_grad()
    def run(self, local: Tensor) -> Tensor:
        """The same beside autograd."""
        value, placement = local, self.source
        for step in self.steps(local.element_size()):
            value = getattr(self, f"_{step.operation}")(value, step, placement)
            placement = step.placement
        return value.clone() if value.untyped_storage()._cdata == local.untyped_storage()._cdata else value

    # one step each: `value` lies as `before` says

    def _span(self, placement: Placement, dim: int) -> tuple[int, int]:
        return extent(self.shape[dim], placement.dims[dim], self.sizes, self.at)

    def _slice(self, value: Tensor, step: Step, before: Placement) -> Tensor:
        (axis,) = step.axes
        return value.narrow(step.dim, *piece(value.shape[step.dim], self.sizes[axis], self.at[axis])).contiguous()

    def _lift(self, value: Tensor, step: Step, before: Placement) -> Tensor:
        (axis,) = step.axes
        return value if self.at[axis] == 0 else torch.zeros_like(value)

    def _spread(self, value: Tensor, step: Step, before: Placement) -> Tensor:
        (axis,) = step.axes
        _, length = self._span(step.placement, step.dim)
        start, mine = piece(length, self.sizes[axis], self.at[axis])
        out = value.new_zeros(*value.shape[: step.dim], length, *value.shape[step.dim + 1 :])
        out.narrow(step.dim, start, mine).copy_(value)
        return out

    def _all_reduce(self, value: Tensor, step: Step, before: Placement) -> Tensor:
        return self.axes.group(*step.axes).all_reduce(value.clone().contiguous(), purpose=PURPOSE)

    def _reduce_scatter(self, value: Tensor, step: Step, before: Placement) -> Tensor:
        (axis,) = step.axes
        ranks, length = self.sizes[axis], value.shape[step.dim]
        rows = _filled_up(value.movedim(step.dim, 0), ranks * longest(length, ranks))
        out = rows.new_empty(rows.shape[0] // ranks, *rows.shape[1:])
        self.axes.group(axis).reduce_scatter(out, rows, purpose=PURPOSE)
        _, mine = piece(length, ranks, self.at[axis])
        return out[:mine].movedim(0, step.dim).contiguous()

    def _all_gather(self, value: Tensor, step: Step, before: Placement) -> Tensor:
        (axis,) = step.axes
        ranks, (_, length) = self.sizes[axis], self._span(step.placement, step.dim)
        rows = _filled_up(value.movedim(step.dim, 0), longest(length, ranks))
        out = rows.new_empty(ranks * rows.shape[0], *rows.shape[1:])
        self.axes.group(axis).all_gather(out, rows, purpose=PURPOSE)
        return out[:length].movedim(0, step.dim).contiguous()

    def _all_to_all(self, value: Tensor, step: Step, before: Placement) -> Tensor:
        (axis,) = step.axes
        ranks, (_, length) = self.sizes[axis], self._span(step.placement, step.dim)
        parted = value.shape[step.to_dim]
        whole = _filled_up(value.movedim((step.to_dim, step.dim), (0, 1)), ranks * longest(parted, ranks), longest(length, ranks))
        rows = whole.reshape(ranks, longest(parted, ranks), *whole.shape[1:])
        out = torch.empty_like(rows)  # [from whom, piece of to_dim, piece of dim, ...]
        self.axes.group(axis).all_to_all(out, rows, purpose=PURPOSE)
        _, mine = piece(parted, ranks, self.at[axis])
        joined = out.movedim(0, 1).flatten(1, 2)[:mine, :length]
        return joined.movedim((0, 1), (step.to_dim, step.dim)).contiguous()

    def _permute(self, value: Tensor, step: Step, before: Placement) -> Tensor:
        """Piece number p, counted by the cuts as they were, goes to the rank that has that number as they will be."""
        old, new = before.dims[step.dim], step.placement.dims[step.dim]
        group, cuts = self.axes.group(*old), [axis for axis in self.axes.names() if axis in old]
        target = _rank_of(_number(old, self.sizes, self.at), new, cuts, self.sizes)
        source = _rank_of(_number(new, self.sizes, self.at), old, cuts, self.sizes)
        value = value.contiguous()
        return group.exchange(torch.empty_like(value), source, value, target, purpose=PURPOSE)


class _Redistribute(torch.autograd.Function):
    """Linear: forward mode applies the same to tangents."""

    @staticmethod
    def forward(local: Tensor, move: Redistribution) -> Tensor:
        return move.run(local)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Redistribution], output: Tensor) -> None:
        ctx.move = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Redistribute.apply(grads[0], ctx.move.derivative()), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Redistribute.apply(tangents[0], ctx.move)


def _filled_up(value: Tensor, *lengths: int) -> Tensor:
    """`value` with zeros at the end of its first dims up to `lengths`, contiguous."""
    missing = [length - have for length, have in zip(lengths, value.shape, strict=False)]
    if any(missing):
        pad = [0] * (2 * (value.dim() - len(lengths)))
        for number in reversed(missing):
            pad += [0, number]
        value = F.pad(value, pad)
    return value.contiguous()


def _number(cuts: tuple[str, ...], sizes: Mapping[str, int], at: Mapping[str, int]) -> int:
    """Which piece the rank `at` holds, of a dim cut by `cuts`."""
    number = 0
    for axis in cuts:
        number = number * sizes[axis] + at[axis]
    return number


def _rank_of(number: int, cuts: tuple[str, ...], order: list[str], sizes: Mapping[str, int]) -> int:
    """The rank, in a group of the axes in `order`, that holds piece `number` of a dim cut by `cuts`."""
    at = {}
    for axis in reversed(cuts):
        number, at[axis] = divmod(number, sizes[axis])
    return _number(tuple(order), sizes, at)
