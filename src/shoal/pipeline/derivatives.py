"""Derivatives that a model takes in its forward, while that is looked at without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

BETWEEN = (
    "the model takes derivatives between its parts (torch.autograd.grad), and each stage has the graph of its own "
    "parts alone: take them inside of one block (an item of an nn.ModuleList, with a forward of its own), or take "
    "plan.pp = 1"
)


class Derivatives(TorchFunctionMode):
    """Calls `told` before each derivative that is taken inside the context."""

    def __init__(self, told: Callable[[], None]) -> None:
        super().__init__()
        self._told = told

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad:
            self._told()
        return func(*args, **(kwargs or {}))


def with_derivatives(run: Callable[[Any, Any], Any], args: Any, kwargs: Any) -> Any:
    """Returns what `run` gives of arguments; once more, with a graph, where it takes derivatives itself."""
    try:
        return run(args, kwargs)
    except RuntimeError as error:
        if torch.is_grad_enabled() or "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return run(*tree_map_only(Tensor, _with_gradient, (args, kwargs)))


def _with_gradient(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
