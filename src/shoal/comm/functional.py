"""Collectives that autograd passes through, in pairs that are each other's derivative (Megatron-LM's f and g, arXiv 1909.08053).

`copy_to` enters a region that the ranks of a group compute in parts: identity forward, sum backward. `reduce_from` leaves it: sum
forward, identity backward. Both are linear, so forward mode (`torch.func.jvp`) applies the same map to tangents, and backward is
made of the other one, so gradients of gradients pass too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.comm.collectives import Group


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: Group) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Group], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _ReduceFrom.apply(grads[0], ctx.group), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0].clone()


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: Group) -> Tensor:
        return group.all_reduce(x.clone().contiguous())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Group], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _CopyTo.apply(grads[0], ctx.group), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _ReduceFrom.apply(tangents[0], ctx.group)


def copy_to(x: Tensor, group: Group) -> Tensor:
    """A tensor equal on all ranks enters their parallel region: gradients that flow back are summed over `group`."""
    return _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """The sum over `group` of each rank's part leaves the parallel region: the gradient flows back to each rank as it is."""
    return _ReduceFrom.apply(x, group)
