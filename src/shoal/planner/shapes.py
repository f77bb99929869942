"""Stands-in for the tensors that a module is called with: their sizes, formats and whether they want a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True)
class Shape:
    """What is kept of a tensor. Its text tells calls apart."""

    size: tuple[int, ...]
    dtype: torch.dtype
    wants_grad: bool


def shapes_of(values: Any) -> Any:
    """Returns nested `values` with a Shape in the place of each tensor."""
    return tree_map_only(Tensor, lambda leaf: Shape(tuple(leaf.shape), leaf.dtype, leaf.requires_grad), values)


def tensors_of(values: Any, make: Callable[[Shape], Tensor]) -> Any:
    """Returns what `shapes_of` gave with a tensor that `make` makes in the place of each Shape."""
    return tree_map_only(Shape, make, values)
