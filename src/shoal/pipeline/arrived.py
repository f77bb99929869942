"""A value from another stage in the autograd graph of this one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


class Box:
    """`tensor` holds `value` and is no leaf, so that the model may write to it. `grad`: its gradient, after a backward; `edge`: where that comes."""

    def __init__(self, value: Tensor) -> None:
        self.grad: Tensor | None = None
        anchor = torch.zeros((), requires_grad=True, device=value.device)
        self.tensor: Tensor = _Arrived.apply(anchor, value, self)
        assert self.tensor.grad_fn is not None
        self.edge = GradientEdge(self.tensor.grad_fn, 0)


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, box: Box) -> Tensor:
        ctx.box = box
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.box.grad = grads[0]
        return None, None, None
