"""Tensors that a part leaves on its modules in a forward, such as the balance loss of experts, by themselves or in a
list or dict. The model, or the loss, may read them there on another stage, so they go the way of results."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shoal.module.attributes import holders
from shoal.module.stand_in import leave

_INSIDE = "\0"
"""Stands in the name of a tensor between the attribute that holds it and the way to it in there."""


def attributes(part: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors that are plain attributes of the modules in `part`, or in lists and dicts there, by their
    names from there."""
    found: dict[str, Tensor] = {}
    for name, module in part.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                found[f"{name}.{key}".lstrip(".")] = value
        for key, value in holders(vars(module)):
            if isinstance(value, tuple):
                continue
            for way, each in _tensors_in(value, ()):
                found[f"{name}.{key}".lstrip(".") + _INSIDE + json.dumps(way)] = each
    return found


def _tensors_in(value: Any, way: tuple[int | str, ...]) -> Iterator[tuple[tuple[int | str, ...], Tensor]]:
    """Yields the tensors in a list or dict, and in those in it, each with the indices and keys that lead to it."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, Tensor) and isinstance(key, int | str):
            yield (*way, key), each
        elif isinstance(each, list | dict) and isinstance(key, int | str):
            yield from _tensors_in(each, (*way, key))


def left(part: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the attributes that are other tensors now than `before`."""
    return {name: value for name, value in attributes(part).items() if before.get(name) is not value}


def read(part: nn.Module, names: Iterable[str]) -> dict[str, Tensor | None]:
    """Returns attributes by their names; None for one that there is not any more."""
    now = attributes(part)
    return {name: now.get(name) for name in names}


def put(part: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Sets attributes of a part that another stage has to what it has left there."""
    for name, value in tensors.items():
        attribute, _, way = name.partition(_INSIDE)
        path, _, key = attribute.rpartition(".")
        module = part.get_submodule(path)
        if way:
            put_in(vars(module), [key, *json.loads(way)], value)
        else:
            leave(module, key, value)


def put_in(holder: Any, way: Sequence[int | str], value: Any) -> None:
    """Sets what `way` leads to from a list, dict or object, to which another stage has added it, with the lists and
    dicts on the way that are not here yet."""
    for key, inside in itertools.pairwise(way):
        if not _holds(_at(holder, key)):
            _set(holder, key, [] if isinstance(inside, int) else {})
        holder = _at(holder, key)
    _set(holder, way[-1], value)


def table_of(holder: Any) -> Any:
    """Returns what is found in a holder by indices or keys: in an object its attributes; nothing in modules, classes
    and functions."""
    if isinstance(holder, dict | list | tuple | deque):
        return holder
    return vars(holder) if _holds(holder) else {}


def _holds(value: Any) -> bool:
    """Whether something may be put into a value by indices, keys or attributes."""
    if isinstance(value, dict | list | tuple | deque):
        return True
    return hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module | type) and not callable(value)


def _at(holder: Any, key: int | str) -> Any:
    table = table_of(holder)
    if isinstance(table, dict):
        return table.get(key)
    return table[key] if isinstance(key, int) and key < len(table) else None


def _set(holder: Any, key: int | str, value: Any) -> None:
    table = table_of(holder)
    if isinstance(table, dict) or (isinstance(key, int) and key < len(table)):
        table[key] = value
    else:
        table.append(value)
