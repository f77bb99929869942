"""Sets the sizes that modules keep as attributes to those of a rank when their parameters are cut."""

from __future__ import annotations

from torch import nn


def set_sizes(module: nn.Module, length: int, *names: str) -> None:
    """Sets each of the attributes `names` that `module` has to `length`."""
    for name in names:
        if hasattr(module, name):
            setattr(module, name, length)


def first_shape(module: nn.Module) -> tuple[int, ...]:
    """Returns the shape of the first of a module's own parameters; () if it has none."""
    return next((tuple(each.shape) for each in module.parameters(recurse=False)), ())
