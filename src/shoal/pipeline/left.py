"""Tensors that a part leaves on its modules in a forward, such as the balance loss of experts. The model, or the loss,
may read them there on another stage, so they go the way of results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from shoal.module.stand_in import leave


def attributes(part: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors that are plain attributes of the modules in `part`, by their names from there."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, module in part.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def left(part: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the attributes that are other tensors now than `before`."""
    return {name: value for name, value in attributes(part).items() if before.get(name) is not value}


def read(part: nn.Module, names: Iterable[str]) -> dict[str, Tensor | None]:
    """Returns attributes by their names; None for one that there is not any more."""
    found: dict[str, Tensor | None] = {}
    for name in names:
        path, _, key = name.rpartition(".")
        found[name] = getattr(part.get_submodule(path), key, None)
    return found


def put(part: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Sets attributes of a part that another stage has to what it has left there."""
    for name, value in tensors.items():
        path, _, key = name.rpartition(".")
        leave(part.get_submodule(path), key, value)
