"""What modules keep as plain attributes: tensors and numbers, also in lists and dicts, that a forward may change, and
of which neither replicas nor checkpoints know."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.errors import UserError
from shoal.module.record import has_values, storage_of


class Kept:
    """The tensors that modules of `root` keep as plain attributes, also in lists and dicts, but for views of
    parameters, and those of modules that they keep so."""

    def __init__(self, root: nn.Module) -> None:
        self._weights, registered = _storages(root), set(root.modules())
        self._tables = {prefix: vars(each) for prefix, each in root.named_modules()}
        self._hidden: dict[str, tuple[dict[str, Any], str]] = {}
        for prefix, table in self._tables.items():
            modules = [(name, value) for name, value in table.items() if isinstance(value, nn.Module)]
            for name, value in (*modules, *holders(table)):
                for hidden in tree_leaves(value):
                    if isinstance(hidden, nn.Module) and hidden not in registered:
                        self._hidden |= _inside(hidden, f"{prefix}.{name}".lstrip("."))

    def now(self) -> dict[str, Tensor]:
        """The tensors by name, as far as they are there now, but for those of other stages, without values."""
        found = [(name, table.get(key)) for name, (table, key) in self._hidden.items()]
        for prefix, table in self._tables.items():
            own = [(name, value) for name, value in table.items() if type(value) is Tensor]
            own += [(f"{name}[{at}]", each) for name, value in holders(table) for at, each in _tensors_of(value)]
            found += [(f"{prefix}.{name}".lstrip("."), each) for name, each in own if _has_memory(each, self._weights)]
        return {name: kept for name, kept in found if isinstance(kept, Tensor) and has_values(kept)}

    def values(self) -> dict[str, tuple[Any, ...]]:
        """What the tensors look like now: shape, dtype and two numbers."""
        return {name: (each.shape, each.dtype, number_of(each).tolist()) for name, each in self.now().items()}

    def check(self, before: Mapping[str, tuple[Any, ...]], used: Collection[str]) -> None:
        """Raises UserError for one that a forward has used and given other values: it goes from microbatch to
        microbatch. `before`: `values` before the forward; `used`: names."""
        for name, now in self.values().items() if used else ():
            if name in used and name in before and now[:2] == before[name][:2] and now != before[name]:
                raise UserError(
                    f"a forward depends on {name}, a tensor that its module keeps as a plain attribute, and changes "
                    "it: each replica would go on with another one. Keep it in a buffer (self.register_buffer), on "
                    "which replicas agree, or take plan.dp = 1"
                )


def number_of(tensor: Tensor) -> Tensor:
    """Returns two numbers (int64 [2]) for the values of `tensor`: bits that are equal cancel out in the first.

    Takes no memory to speak of: floating numbers are added in their own format, since torch makes a whole copy of what
    it adds in another.
    """
    if not tensor.numel() or tensor.layout != torch.strided:
        return torch.zeros(2, dtype=torch.int64, device=tensor.device)
    flat = (torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()).flatten()
    flat = flat if flat.is_floating_point() and flat.itemsize > 1 else bits(flat)
    pieces = flat.split(AT_ONCE)
    total = torch.stack([each.sum() for each in pieces]).to(torch.float64).sum()
    return torch.stack([torch.hash_tensor(flat).view(torch.int64), total.view(torch.int64)])


AT_ONCE = 2**18
"""Numbers of a tensor that are added at a time: those of bf16 lose less, and a copy of integers stays small."""


def bits(flat: Tensor) -> Tensor:
    """Views a 1-D tensor as integers, of which NaN equals itself."""
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.itemsize])


_OF_ALL = frozenset(vars(nn.Module()))
"""Names of the tables that each module has."""
_HOLDERS = frozenset([list, tuple, dict, OrderedDict, defaultdict, deque])


def holders(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the lists, tuples and dicts among the plain attributes of a module, which its `table` has."""
    for name, value in table.items():
        if type(value) in _HOLDERS and name not in _OF_ALL:
            yield name, value


def _tensors_of(value: Any) -> Iterator[tuple[int, Tensor]]:
    """Yields the tensors in a list or dict with their places among all that it holds."""
    for at, each in enumerate(tree_leaves(value)):
        if type(each) is Tensor:
            yield at, each


def _inside(hidden: nn.Module, prefix: str) -> dict[str, tuple[dict[str, Any], str]]:
    """Returns the places of the parameters and buffers of a module that is registered nowhere."""
    tables = [(name, table) for name, each in hidden.named_modules() for table in (each._parameters, each._buffers)]
    places = [(name, key, table) for name, table in tables if isinstance(table, dict) for key in table]
    return {".".join(part for part in (prefix, name, key) if part): (table, key) for name, key, table in places}


def _storages(root: nn.Module) -> set[int]:
    """Returns the memories of parameters, none of which is asked for where they come and go (see chunks.asked)."""
    tables = [each._parameters for each in root.modules()]
    found = [each for table in tables for each in (dict.values(table) if isinstance(table, dict) else table.values())]
    return {storage_of(each) for each in found if each is not None and each.layout == torch.strided}


def _has_memory(value: object, weights: Collection[int]) -> bool:
    """Whether `value` is a tensor with memory of its own: no view of a weight, which may come and go."""
    if type(value) is not Tensor or value.layout != torch.strided:
        return False
    return storage_of(value) not in weights and value.untyped_storage().nbytes() >= value.nbytes


Plain = tuple[dict[str, Any], str, Any]
"""A plain attribute: the table that has it, its name, its value."""
_PLAIN = frozenset([int, float, bool, type(None)])


def plain_attributes(root: nn.Module) -> list[Plain]:
    """Returns the tensors, numbers and flags that modules of `root` keep as plain attributes now, and copies of their
    lists and dicts, where these hold tensors or nothing."""
    tables = [vars(each) for each in root.modules()]
    found = [
        (table, name, value)
        for table in tables
        for name, value in table.items()
        if type(value) in _PLAIN or type(value) is Tensor
    ]
    held = ((table, name, value) for table in tables for name, value in holders(table))
    return [*found, *((*at, copy(value)) for *at, value in held if not value or any(_tensors_of(value)))]


@contextmanager
def attributes_as_found(found: Sequence[Plain]) -> Iterator[None]:
    """Gives plain attributes the values that they were `found` with, inside the context."""
    now = [(table, name, table[name]) for table, name, _ in found if name in table]
    for table, name, value in found:
        table[name] = copy(value) if type(value) in _HOLDERS else value
    try:
        yield
    finally:
        for table, name, value in now:
            table[name] = value


@contextmanager
def attributes_put_back(root: nn.Module) -> Iterator[None]:
    """Gives plain attributes of the modules of `root` the tensors, numbers and flags that they have now, alone or in
    lists and dicts, after the context."""
    owners, weights = [(vars(each), type(each), set(vars(each))) for each in root.modules()], _storages(root)
    before = [
        (table, name, value)
        for table, _, _ in owners
        for name, value in table.items()
        if type(value) in _PLAIN or _has_memory(value, weights)
    ]
    before += [(table, *each) for table, _, _ in owners for each in holders(table)]
    kept = [each for *_, value in before for each in tree_leaves(value) if _has_memory(each, weights)]
    values = [(each, each.detach().clone()) for each in kept]
    with contents_put_back(root):
        try:
            yield
        finally:
            for table, kind, names in owners:
                for name in [name for name in table if name not in names and hasattr(kind, name)]:
                    del table[name]  # that of the class holds again
            with torch.no_grad():
                for each, value in values:
                    if not torch.equal(each, value):
                        each.copy_(value)
            for table, name, value in before:
                if name in table:
                    table[name] = value


@contextmanager
def contents_put_back(root: nn.Module) -> Iterator[None]:
    """Gives the lists and dicts that modules of `root` keep as plain attributes what they hold now, after the
    context."""
    found = [each for module in root.modules() for _, value in holders(vars(module)) for each in _nested(value)]
    before = [(each, copy(each)) for each in found]
    try:
        yield
    finally:
        for each, content in before:
            each.clear()
            each.update(content) if isinstance(each, dict) else each.extend(content)


def _nested(value: Any) -> Iterator[Any]:
    """Yields a list or dict and those that it holds."""
    if type(value) is not tuple:
        yield value
    for each in value.values() if isinstance(value, dict) else value:
        if type(each) in _HOLDERS:
            yield from _nested(each)
