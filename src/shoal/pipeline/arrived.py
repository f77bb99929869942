"""A value from another stage in the autograd graph of this one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


class Box:
    """`tensor` holds `value` and is no leaf, so that the model may write to it; `edge`: where its gradient comes."""

    def __init__(self, value: Tensor) -> None:
        self._came: list[Tensor] = []  # the graph has this and not the box, which has the graph
        anchor = torch.zeros((), requires_grad=True, device=value.device)
        self.tensor: Tensor = _Arrived.apply(anchor, value, self._came)
        assert self.tensor.grad_fn is not None
        self.edge = GradientEdge(self.tensor.grad_fn, 0)

    @property
    def grad(self) -> Tensor | None:
        """Its gradient, after a backward."""
        return self._came[0] if self._came else None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, came: list[Tensor]) -> Tensor:
        ctx.came = came
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.came[:] = grads
        return None, None, None
