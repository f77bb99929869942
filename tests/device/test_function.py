"""Autograd functions whose calls do not ask `inspect` what they are told by position."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.device import applied

pytestmark = pytest.mark.fast


class Scaled(torch.autograd.Function):
    """Multiplies by a number."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return applied(Scaled, grads[0], ctx.factor), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return applied(Scaled, tangents[0], ctx.factor)


def cubed(x: Tensor) -> Tensor:
    return (applied(Scaled, x, 3.0) ** 3).sum()


def test_a_call_asks_nobody_for_parameters(monkeypatch):
    def asked(*args: Any, **options: Any) -> Any:
        raise AssertionError("asked for a signature")

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    monkeypatch.setattr(inspect, "signature", asked)
    total = cubed(x)
    (gradient,) = torch.autograd.grad(total, x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert torch.equal(gradient, 81 * x**2) and torch.equal(second, 162 * x)


def test_transforms_go_through():
    x, tangent = torch.tensor([1.0, 2.0]), torch.tensor([1.0, -1.0])
    value, slope = torch.func.jvp(cubed, (x,), (tangent,))
    assert value == cubed(x) and slope == (81 * x**2 * tangent).sum()
    assert torch.equal(torch.func.grad(cubed)(x), 81 * x**2)
    assert torch.equal(torch.func.grad(lambda x: torch.func.grad(cubed)(x).sum())(x), 162 * x)


def test_compiled_functions_call_it():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    total = torch.compile(cubed, backend="aot_eager")(x)
    total.backward()
    assert torch.equal(x.grad, 81 * x.detach() ** 2)
