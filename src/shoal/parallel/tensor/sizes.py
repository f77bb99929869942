"""The sizes that modules keep as attributes: set to those of a rank when their parameters are cut."""

from __future__ import annotations

from torch import nn


def set_sizes(module: nn.Module, length: int, *names: str) -> None:
    """Sets those of the attributes `names` that `module` has."""
    for name in names:
        if hasattr(module, name):
            setattr(module, name, length)
