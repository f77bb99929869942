"""A value of another stage in the autograd graph of this one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


class Box:
    """Puts a received value into the graph.

    Attributes: `tensor` holds the value and is no leaf, so that the model may write to it; `edge` is where its gradient
    arrives.
    """

    def __init__(self, value: Tensor) -> None:
        self._came: list[Tensor] = []  # the graph refers to this list: a reference to the box would be a cycle
        anchor = torch.zeros((), requires_grad=True, device=value.device)
        self.tensor: Tensor = _Arrived.apply(anchor, value, self._came)
        assert self.tensor.grad_fn is not None
        self.edge = GradientEdge(self.tensor.grad_fn, 0)

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the value, after a backward; None if there is none."""
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
