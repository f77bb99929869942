"""Values that code takes out of tensors by ways that are no operations of torch, so that no dispatch mode is told of
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

_READS = {each: f"Tensor.{each.__name__}" for each in (Tensor.tolist, Tensor.numpy, Tensor.__array__)}


class Reads(TorchFunctionMode):
    """Calls `told(tensor, how)`, before it is done, for each tensor whose values are read so inside the context."""

    def __init__(self, told: Callable[[Tensor, str], None]) -> None:
        super().__init__()
        self._told = told

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            self._told(args[0], _READS[func])
        return func(*args, **(kwargs or {}))
