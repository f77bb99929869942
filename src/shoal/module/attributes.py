"""What modules keep as plain attributes: tensors and numbers that a forward may change, of which replicas do not know
and which no checkpoint has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.module.record import storage_of


class Kept:
    """The tensors that modules of `root` keep as plain attributes, but for views of parameters."""

    def __init__(self, root: nn.Module) -> None:
        weights = _storages(root)
        self._places = {
            f"{prefix}.{name}".lstrip("."): (owner, name)
            for prefix, owner in root.named_modules()
            for name, value in vars(owner).items()
            if _has_memory(value, weights)
        }

    def now(self) -> dict[str, Tensor]:
        """The tensors by name, as far as they still are tensors."""
        places = self._places.items()
        return {name: kept for name, (owner, key) in places if isinstance(kept := vars(owner).get(key), Tensor)}

    def check(self, before: Mapping[str, Tensor], copies: Mapping[str, Tensor], used: Collection[str]) -> None:
        """Raises UserError for one that a forward has used and given other values: it goes from microbatch to
        microbatch. `before`: as `now` before the forward, with `copies` of the values; `used`: names."""
        for name, kept in self.now().items():
            if name in used and name in before and kept.shape == before[name].shape and _differ(kept, copies[name]):
                raise UserError(
                    f"a forward depends on {name}, a tensor that its module keeps as a plain attribute, and changes "
                    "it: each replica would go on with another one. Keep it in a buffer (self.register_buffer), on "
                    "which replicas agree, or take plan.dp = 1"
                )


def _storages(root: nn.Module) -> set[int]:
    return {storage_of(each) for each in root.parameters() if each.layout == torch.strided}


def _has_memory(value: object, weights: Collection[int]) -> bool:
    """Whether `value` is a tensor with memory of its own: no view of a weight, which may come and go."""
    if type(value) is not Tensor or value.layout != torch.strided:
        return False
    return storage_of(value) not in weights and value.untyped_storage().nbytes() >= value.nbytes


def _differ(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(one.detach().to(other.dtype), other)


Plain = tuple[dict[str, Any], str, Any]
"""A plain attribute: the table that has it, its name, its value."""


def plain_attributes(root: nn.Module) -> list[Plain]:
    """Returns the tensors, numbers and flags that modules of `root` keep as plain attributes now."""
    tables = [vars(each) for each in root.modules()]
    return [
        (table, name, value)
        for table in tables
        for name, value in table.items()
        if type(value) in (Tensor, int, float, bool)
    ]


@contextmanager
def attributes_as_found(found: Sequence[Plain]) -> Iterator[None]:
    """Gives plain attributes the values that they were `found` with, inside the context."""
    now = [(table, name, table[name]) for table, name, _ in found if name in table]
    for table, name, value in found:
        table[name] = value
    try:
        yield
    finally:
        for table, name, value in now:
            table[name] = value


@contextmanager
def attributes_put_back(root: nn.Module) -> Iterator[None]:
    """Gives plain attributes of the modules of `root` the tensors, numbers and flags that they have now, after the
    context."""
    owners, weights = [(owner, set(vars(owner))) for owner in root.modules()], _storages(root)
    before = [
        (vars(owner), name, value, value.detach().clone() if isinstance(value, Tensor) else None)
        for owner, _ in owners
        for name, value in vars(owner).items()
        if type(value) in (int, float, bool) or _has_memory(value, weights)
    ]
    try:
        yield
    finally:
        for owner, names in owners:
            for name in [name for name in vars(owner) if name not in names and hasattr(type(owner), name)]:
                delattr(owner, name)  # that of the class holds again
        with torch.no_grad():
            for table, name, value, copy in before:
                if copy is not None and not torch.equal(value, copy):
                    value.copy_(copy)
                if name in table:
                    table[name] = value
