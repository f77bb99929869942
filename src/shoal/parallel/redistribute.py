"""Moves a tensor from one placement to another, by the cheapest route (see route); differentiable.

A redistribution changes no value of the global tensor, so its derivative is a redistribution too: of the gradient,
between the dual placements. Each summand has the gradient of the sum; a cut tensor has its cut of the gradient. Where
the result is the same on all ranks of some axes and each uses it for something else, the gradient comes back as
summands: `summed` names those axes (Megatron-LM's f is R -> R with summed = {tp}).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm import Group
from shoal.device import applied
from shoal.parallel.placement import Placement, extent, longest, piece
from shoal.parallel.route import Costs, Question, Step, route

PURPOSE = "redistribute"


class Axes(Protocol):
    """A mesh with its process groups; `MeshGroups` is the one in use."""

    def size(self, axis: str) -> int: ...
    def rank(self, axis: str) -> int: ...
    def group(self, *axes: str) -> Group:
        """The group of the ranks that differ from this one only along `axes`, in the mesh's order."""

    def names(self) -> tuple[str, ...]: ...


class Redistribution:
    """Moves tensors of one global shape from `source` to `target`; the route is found per element size.

    shape: of the global tensor
    source, target: its placement before and after
    axes: the mesh with its groups
    costs: what the links take, by which the route is chosen
    summed: axes along which the result is the same on all ranks but its gradients are summands

    Raises ValueError for an axis in `summed` along which the result differs.
    """

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
        """Returns the redistribution of the gradients, from the dual of the target to the dual of the source."""
        source, target = self.target.dual(self.summed), self.source.dual()
        return Redistribution(self.shape, source, target, self.axes, self.costs)

    def steps(self, itemsize: int) -> tuple[Step, ...]:
        """Returns the steps of the route for elements of `itemsize` bytes."""
        return route(Question(self.shape, itemsize, tuple(self.sizes.items())), self.source, self.target, self.costs)

    def __call__(self, local: Tensor) -> Tensor:
        """Returns this rank's piece of the target, in new memory, given its piece `local` of the source;
        differentiable.

        Raises ValueError if `local` has another shape than `source` gives it.
        """
        here = self.source.box(self.shape, self.sizes, self.at).sizes
        if tuple(local.shape) != here:
            raise ValueError(
                f"a piece of shape {tuple(local.shape)}: of {self.shape} placed as {self.source} this rank holds {here}"
            )
        return applied(_Redistribute, local, self)

    @torch.no_grad()
    def run(self, local: Tensor) -> Tensor:
        """Moves without autograd; see `__call__`."""
        value, placement = local, self.source
        for step in self.steps(local.element_size()):
            value = getattr(self, f"_{step.operation}")(value, step, placement)
            placement = step.placement
        return value.clone() if value.untyped_storage()._cdata == local.untyped_storage()._cdata else value

    # one operation each: `value` is this rank's piece under the placement `before`

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
        whole = _filled_up(
            value.movedim((step.to_dim, step.dim), (0, 1)), ranks * longest(parted, ranks), longest(length, ranks)
        )
        rows = whole.reshape(ranks, longest(parted, ranks), *whole.shape[1:])
        out = torch.empty_like(rows)  # [source rank, piece of to_dim, piece of dim, ...]
        self.axes.group(axis).all_to_all(out, rows, purpose=PURPOSE)
        _, mine = piece(parted, ranks, self.at[axis])
        joined = out.movedim(0, 1).flatten(1, 2)[:mine, :length]
        return joined.movedim((0, 1), (step.to_dim, step.dim)).contiguous()

    def _permute(self, value: Tensor, step: Step, before: Placement) -> Tensor:
        """Sends this rank's piece to the rank that has its number under the new order of the cuts, and receives its
        own.
        """
        old, new = before.dims[step.dim], step.placement.dims[step.dim]
        group, cuts = self.axes.group(*old), [axis for axis in self.axes.names() if axis in old]
        target = _rank_of(_number(old, self.sizes, self.at), new, cuts, self.sizes)
        source = _rank_of(_number(new, self.sizes, self.at), old, cuts, self.sizes)
        value = value.contiguous()
        return group.exchange(torch.empty_like(value), source, value, target, purpose=PURPOSE)


class _Redistribute(torch.autograd.Function):
    """The redistribution as an autograd function. It is linear, so forward mode applies it to tangents."""

    @staticmethod
    def forward(local: Tensor, move: Redistribution) -> Tensor:
        return move.run(local)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Redistribution], output: Tensor) -> None:
        ctx.move = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return applied(_Redistribute, grads[0], ctx.move.derivative()), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return applied(_Redistribute, tangents[0], ctx.move)


def _filled_up(value: Tensor, *lengths: int) -> Tensor:
    """Returns `value`, contiguous, padded with zeros at the end of its first dims up to `lengths`."""
    missing = [length - have for length, have in zip(lengths, value.shape, strict=False)]
    if any(missing):
        pad = [0] * (2 * (value.dim() - len(lengths)))
        for number in reversed(missing):
            pad += [0, number]
        value = F.pad(value, pad)
    return value.contiguous()


def _number(cuts: tuple[str, ...], sizes: Mapping[str, int], at: Mapping[str, int]) -> int:
    """Returns the index of the piece that the rank at the coordinates `at` holds of a dim cut by `cuts`."""
    number = 0
    for axis in cuts:
        number = number * sizes[axis] + at[axis]
    return number


def _rank_of(number: int, cuts: tuple[str, ...], order: list[str], sizes: Mapping[str, int]) -> int:
    """Returns the rank, in a group of the axes in `order`, that holds piece `number` of a dim cut by `cuts`."""
    at = {}
    for axis in reversed(cuts):
        number, at[axis] = divmod(number, sizes[axis])
    return _number(tuple(order), sizes, at)
