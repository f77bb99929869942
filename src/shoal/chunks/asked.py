"""What a module has of parameters: those that are registered, where it is seen who reads them, and those that it keeps
as plain attributes, where it is not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class Asked(dict[str, Any]):
    """A module's parameters by name; calls `asked` with one that is read."""

    def __init__(self, parameters: Mapping[str, Any], asked: Callable[[Tensor], None]) -> None:
        super().__init__(parameters)
        self._asked = asked

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return {name: copy.deepcopy(parameter, memo) for name, parameter in super().items()}

    def _told(self, parameter: Any) -> Any:
        if parameter is not None:
            self._asked(parameter)
        return parameter

    def __getitem__(self, name: str) -> Any:
        return self._told(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._told(super().get(name, default)) if name in self else default

    def values(self) -> Any:
        return (self._told(parameter) for parameter in super().values())

    def items(self) -> Any:
        return ((name, self._told(parameter)) for name, parameter in super().items())


def attributes(module: nn.Module) -> Iterator[Tensor]:
    """Yields the tensors in plain attributes of `module` itself: parameters in a list, views of them."""
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules") and not (isinstance(value, dict) and not value):
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                    yield leaf
