"""What a part changes in the lists, dicts and objects that it is given, such as a list to which each block adds its
balance loss. The model makes these on every stage, so what a part of another stage has put there goes the way of
results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.parallel.axis import StaysHere
from shoal.pipeline.left import put_in, table_of

_HANDED = "\1"
"""Begins the name of a value in an argument; the indices, keys and attributes that lead there follow."""
_PLAIN = Tensor | bool | int | float | str


class Handed:
    """The arguments of a call of a part."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._given = dict[int | str, Any](enumerate(args))
        self._given.update(kwargs.items())

    def now(self) -> dict[str, Any]:
        """The tensors, numbers and texts that lie in lists, dicts and objects among them, by name."""
        given = {key: each for key, each in self._given.items() if not isinstance(each, _PLAIN)}
        return {_HANDED + json.dumps(way): each for way, each in _values(given, (), set())}

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns those of `names` that are of values in them, in this order; None for one that is not there."""
        own = [name for name in names if name.startswith(_HANDED)]
        now = self.now() if own else {}
        return {name: now.get(name) for name in own}

    def put(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Changes them as another stage has done; returns those of `values` that are of other things."""
        others = dict[str, Any]()
        for name, value in values.items():
            if not name.startswith(_HANDED):
                others[name] = value
                continue
            put_in(self._given, json.loads(name.removeprefix(_HANDED)), value)
        return others


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What is there `after` a call and was not, or was another value, `before`."""
    return {name: value for name, value in after.items() if name not in before or not _same(before[name], value)}


def _same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other)


def _values(holder: Any, way: tuple[int | str, ...], seen: set[int]) -> Iterator[tuple[tuple[int | str, ...], Any]]:
    """Yields what lies in `holder`, and in what lies there, but not in logits whose ranks divide them. `seen`: ids of
    what has been looked into."""
    if id(holder) in seen or isinstance(holder, StaysHere):
        return
    seen.add(id(holder))
    table = table_of(holder)
    for key, each in enumerate(table) if not isinstance(table, Mapping) else list(table.items()):
        if type(key) in (int, str):
            if isinstance(each, _PLAIN):
                yield (*way, key), each
            else:
                yield from _values(each, (*way, key), seen)


def hidden(values: Any, seen: set[int]) -> list[Tensor]:
    """Returns the tensors in `values`, also those in objects that torch takes for constants, such as a cache of
    keys and values. `seen`: ids of objects that have been looked into."""
    found: list[Tensor] = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module) and id(leaf) not in seen:
            seen.add(id(leaf))
            found += hidden(dict(vars(leaf)), seen)
    return found
