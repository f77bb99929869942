"""Differentiable collectives, in pairs that are each other's derivative (f and g of Megatron-LM, arXiv 1909.08053).

copy_to         enters a region that the ranks of a group compute in parts: identity forward, sum backward
reduce_from     leaves it: sum forward, identity backward
gather_from     joins the parts of a dim for uses that differ by rank: all-gather forward, reduce-scatter backward
scatter_sum     sums, and leaves each rank its part of a dim: reduce-scatter forward, all-gather backward
gather_alike    joins parts where all ranks then do the same: all-gather forward, own part of the gradient backward
swap            exchanges a part of one dim for a part of another: all-to-all both ways
deal_out        sends rows to the ranks that want them: all-to-all both ways
sum_everywhere  sums values from which each rank computes a part of the loss: sum both ways

All are linear, so forward mode (`torch.func.jvp`) applies the same map to tangents, and backward consists of the other
map of the pair, so higher derivatives work too. Parts of a dim need not be even: `lengths[r]` is the length on rank r.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collectives import Group
from shoal.device import applied

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Pair:
    """A linear map and its transpose."""

    forward: Map
    backward: Map

    def __call__(self, x: Tensor) -> Tensor:
        return applied(_Linear, x, self)

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
    """Returns `x`, equal on all ranks, for their parallel region: its gradients are summed over `group`.

    What is returned has the memory of `x` and must not be changed in place.
    """
    return _Pair(_alias, _summed(group, purpose))(x)


def reduce_from(x: Tensor, group: Group, purpose: str = "") -> Tensor:
    """Returns the sum over `group` of each rank's `x`, which leaves the parallel region: identity backward."""
    return _Pair(_summed(group, purpose), _same)(x)


def gather_from(x: Tensor, group: Group, dim: int, lengths: Sequence[int] | None = None, purpose: str = "") -> Tensor:
    """Returns the ranks' parts of `dim` (`lengths`; None: even), concatenated, for uses that differ by rank."""
    lengths = tuple(lengths or (x.shape[dim],) * group.size)
    return _Pair(_gathered(group, dim, lengths, purpose), _scattered(group, dim, lengths, purpose))(x)


def scatter_sum(x: Tensor, group: Group, dim: int, lengths: Sequence[int], purpose: str = "") -> Tensor:
    """Returns this rank's part of `dim` (of `lengths`) of the sum over `group`."""
    return _Pair(_scattered(group, dim, tuple(lengths), purpose), _gathered(group, dim, tuple(lengths), purpose))(x)


def gather_alike(x: Tensor, group: Group, dim: int, lengths: Sequence[int], purpose: str = "") -> Tensor:
    """Returns the ranks' parts of `dim` (of `lengths`), concatenated, where all ranks then do the same with them."""
    return _Pair(_gathered(group, dim, tuple(lengths), purpose), _own(group, dim, tuple(lengths)))(x)


def swap(x: Tensor, group: Group, give: int, take: int, purpose: str = "") -> Tensor:
    """Returns all of dim `take`, of which each rank had an even part, and this rank's even part of dim `give`."""
    return _Pair(_swapped(group, give, take, purpose), _swapped(group, take, give, purpose))(x)


def deal_out(x: Tensor, group: Group, give: Sequence[int], take: Sequence[int], purpose: str = "") -> Tensor:
    """Sends `give[r]` rows of `x` [sum(give), ...] to each rank r; returns `take[r]` rows from each."""
    give, take = tuple(give), tuple(take)
    return _Pair(_dealt(group, give, take, purpose), _dealt(group, take, give, purpose))(x)


def sum_everywhere(x: Tensor, group: Group, purpose: str = "") -> Tensor:
    """Returns the sum over `group`, for uses that differ by rank: gradients are summed too."""
    return _Pair(_summed(group, purpose), _summed(group, purpose))(x)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _alias(x: Tensor) -> Tensor:
    return x.detach()  # a view would keep `x` itself alive


def _summed(group: Group, purpose: str) -> Map:
    return lambda x: group.all_reduce(x.clone(memory_format=torch.contiguous_format), purpose=purpose)


def _own(group: Group, dim: int, lengths: tuple[int, ...]) -> Map:
    return lambda x: x.narrow(dim, sum(lengths[: group.rank]), lengths[group.rank]).clone(
        memory_format=torch.contiguous_format
    )


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


def deal_into(
    out: Tensor, x: Tensor, group: Group, give: Sequence[int], take: Sequence[int], purpose: str = ""
) -> Tensor:
    """Does what `deal_out` does, without a derivative, into `out`; both tensors are contiguous."""
    width = x.shape[1:].numel()
    return group.all_to_all(out, x, [width * rows for rows in take], [width * rows for rows in give], purpose)


def _filled_up(x: Tensor, dim: int, length: int) -> Tensor:
    """Pads `x` with zeros at the end of `dim` up to `length`."""
    missing = length - x.shape[dim]
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)
