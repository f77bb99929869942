"""Collectives that autograd passes through, in pairs that are each other's derivative (Megatron-LM's f and g, arXiv 1909.08053).

copy_to       enters a region that the ranks of a group compute in parts: identity forward, sum backward
reduce_from   leaves it: sum forward, identity backward
gather_from   puts the ranks' parts of a dim together for uses that differ: all-gather forward, reduce-scatter backward
scatter_sum   sums, and leaves each rank its part of a dim: reduce-scatter forward, all-gather backward
gather_alike  puts parts together where all ranks then do the same: all-gather forward, each takes its own part of the gradient backward
swap          each rank has a part of one dim and wants a part of another: all-to-all both ways
deal_out      rows go to the ranks that want them: all-to-all both ways
sum_everywhere  sums what each rank then makes its own part of a loss of: sum both ways

All are linear, so forward mode (`torch.func.jvp`) applies the same map to tangents, and backward is made of the other one of a pair, so
gradients of gradients pass too. Parts of a dim need not be even: `lengths[r]` is that of rank r.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collectives import Group

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Pair:
    """A linear map and its transpose."""

    forward: Map
    backward: Map

    def __call__(self, x: Tensor) -> Tensor:
        return _Linear.apply(x, self)

    @property
    def transposed(self) -> _Pair:
        return _Pair(self.backward, self.forward)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, pair: _Pair) -> Tensor:
        return pair.forward(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, _Pair], output: Tensor) -> None:
        ctx.pair = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.pair.transposed(grads[0]), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return ctx.pair(tangents[0])


def copy_to(x: Tensor, group: Group, purpose: str = "") -> Tensor:
    """A tensor equal on all ranks enters their parallel region: gradients that flow back are summed over `group`. A view of `x`."""
    return _Pair(_same, _summed(group, purpose))(x)


def reduce_from(x: Tensor, group: Group, purpose: str = "") -> Tensor:
    """The sum over `group` of each rank's part leaves the parallel region: the gradient flows back to each rank as it is."""
    return _Pair(_summed(group, purpose), _same)(x)


def gather_from(x: Tensor, group: Group, dim: int, lengths: Sequence[int] | None = None, purpose: str = "") -> Tensor:
    """The parts of `dim` that the ranks have (`lengths`, None: even), one after the other, for uses that differ by rank."""
    lengths = tuple(lengths or (x.shape[dim],) * group.size)
    return _Pair(_gathered(group, dim, lengths, purpose), _scattered(group, dim, lengths, purpose))(x)


def scatter_sum(x: Tensor, group: Group, dim: int, lengths: Sequence[int], purpose: str = "") -> Tensor:
    """This rank's part of `dim`, of `lengths`, of the sum over `group`."""
    return _Pair(_scattered(group, dim, tuple(lengths), purpose), _gathered(group, dim, tuple(lengths), purpose))(x)


def gather_alike(x: Tensor, group: Group, dim: int, lengths: Sequence[int], purpose: str = "") -> Tensor:
    """The parts of `dim`, of `lengths`, one after the other, where all ranks then do the same with it."""
    return _Pair(_gathered(group, dim, tuple(lengths), purpose), _own(group, dim, tuple(lengths)))(x)


def swap(x: Tensor, group: Group, give: int, take: int, purpose: str = "") -> Tensor:
    """Of a tensor of which each rank has an even part of dim `take`: all of that dim, and an even part of dim `give`."""
    return _Pair(_swapped(group, give, take, purpose), _swapped(group, take, give, purpose))(x)


def deal_out(x: Tensor, group: Group, give: Sequence[int], take: Sequence[int], purpose: str = "") -> Tensor:
    """The `take[r]` rows that each rank r has for this one, of which `give[r]` of `x` [sum(give), ..] go to rank r."""
    give, take = tuple(give), tuple(take)
    return _Pair(_dealt(group, give, take, purpose), _dealt(group, take, give, purpose))(x)


def sum_everywhere(x: Tensor, group: Group, purpose: str = "") -> Tensor:
    """The sum over `group`, for uses that differ: gradients that flow back are summed too."""
    return _Pair(_summed(group, purpose), _summed(group, purpose))(x)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _summed(group: Group, purpose: str) -> Map:
    return lambda x: group.all_reduce(x.clone(memory_format=torch.contiguous_format), purpose=purpose)


def _own(group: Group, dim: int, lengths: tuple[int, ...]) -> Map:
    return lambda x: x.narrow(dim, sum(lengths[: group.rank]), lengths[group.rank]).clone(memory_format=torch.contiguous_format)


def _gathered(group: Group, dim: int, lengths: tuple[int, ...], purpose: str) -> Map:
    def gathered(x: Tensor) -> Tensor:
        mine = _filled_up(x, dim, max(lengths))
        out = mine.new_empty(group.size, *mine.shape)
        group.all_gather(out, mine, purpose=purpose)
        parts = [part.narrow(dim, 0, length) for part, length in zip(out, lengths, strict=True)]
        return torch.cat(parts, dim)

    return gathered


def _scattered(group: Group, dim: int, lengths: tuple[int, ...], purpose: str) -> Map:
    def scattered(x: Tensor) -> Tensor:
        whole = torch.stack([_filled_up(part, dim, max(lengths)) for part in x.split(lengths, dim)])
        out = whole.new_empty(whole.shape[1:])
        group.reduce_scatter(out, whole, purpose=purpose)
        return out.narrow(dim, 0, lengths[group.rank]).contiguous()

    return scattered


def _swapped(group: Group, give: int, take: int, purpose: str) -> Map:
    def swapped(x: Tensor) -> Tensor:
        parts = torch.stack(x.chunk(group.size, give))
        return torch.cat(group.all_to_all(torch.empty_like(parts), parts, purpose=purpose).unbind(0), take)

    return swapped


def _dealt(group: Group, give: tuple[int, ...], take: tuple[int, ...], purpose: str) -> Map:
    def dealt(x: Tensor) -> Tensor:
        return deal_into(x.new_empty(sum(take), *x.shape[1:]), x.contiguous(), group, give, take, purpose)

    return dealt


def deal_into(out: Tensor, x: Tensor, group: Group, give: Sequence[int], take: Sequence[int], purpose: str = "") -> Tensor:
    """`deal_out` without a derivative, into `out`; both contiguous."""
    width = x.shape[1:].numel()
    return group.all_to_all(out, x, [width * rows for rows in take], [width * rows for rows in give], purpose)


def _filled_up(x: Tensor, dim: int, length: int) -> Tensor:
    """`x` with zeros at the end of `dim` up to `length`."""
    missing = length - x.shape[dim]
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)
