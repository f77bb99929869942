"""A module as a function of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Place = tuple[dict[str, Any], str, Any]
"""A table of a module, a key there, and what it has."""


def call_with(
    module: nn.Module, parameters: Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Calls `module` with `parameters` in place of its own, which it has again afterwards.

    torch.func.functional_call alone (torch 2.13) leaves those that were given in a module that is registered under two
    names: it puts back what it found under the second one, after the first.
    """
    own = weights_of(module)
    try:
        return torch.func.functional_call(module, dict(parameters), tuple(args), dict(kwargs or {}))
    finally:
        for table, key, value in own:
            if dict.get(table, key) is not value:
                dict.__setitem__(table, key, value)


def weights_of(module: nn.Module) -> list[Place]:
    """Returns what `module` has for parameters now, each with its table and its key there: inside such a call other
    tensors."""
    tables = [table for each in module.modules() if isinstance(table := each._parameters, dict)]
    return [(table, key, value) for table in tables for key, value in dict.items(table)]  # asked for, they would come
