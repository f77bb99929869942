"""State of the caller's own, which joins a run's steps and checkpoints: objects registered by name.

user.<name>           the object's values, without tensors, as bytes
user.<name>/<path>    a tensor of it

There is one copy: each rank has an object of its own, the same on all of them, and what the first rank has is saved, or
handed to ranks that go on under another plan, or join.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from shoal.checkpoint.pieces import Piece, Want
from shoal.checkpoint.source import Source
from shoal.checkpoint.values import check_holds, copied, joined, put, split, tensors_beside, value_of
from shoal.comm import Group
from shoal.comm.digest import combined
from shoal.comm.wire import unpack
from shoal.errors import CheckpointError, LaunchError, UserError
from shoal.parallel.layout import Box

_BEFORE = "user."


class UserState:
    """The registered objects, what they were at the last commit, and values that wait for an object that is not
    registered yet."""

    def __init__(self) -> None:
        self._objects = dict[str, Any]()
        self._committed = dict[str, Any]()
        self._waiting = dict[str, Any]()
        self._came_at = 0  # the step of what waits
        self.committed_at = -1
        """The step before which the last commit was made; -1 where none was since values have come."""

    def __len__(self) -> int:
        return len(self._objects)

    def register(self, name: str, thing: Any, step: int) -> None:
        """Adds an object, before the step `step`. If values wait for it, it takes them.

        Raises UserError for what cannot be saved, a name that another object has, and values of an earlier step.
        """
        if not isinstance(name, str) or not name or "/" in name:
            raise UserError(f"engine.state({name!r}, ...): give a name, a text without a slash")
        check_holds(thing, _called(name))
        if self._objects.get(name, thing) is not thing:
            raise UserError(f"{_called(name)}: another object is registered by this name. Give each a name of its own")
        _split(name, value_of(thing))
        if name in self._waiting:
            if step != self._came_at:
                raise UserError(
                    f"{_called(name)}: its values came with step {self._came_at}, and the run is at step {step}: "
                    "register it before the first step that follows"
                )
            put(thing, self._waiting.pop(name), _called(name))
        self._objects[name] = thing
        self._committed[name] = copied(value_of(thing))

    def begin(self, step: int) -> None:
        """Makes a commit before `step`, unless the caller has made one."""
        if self.committed_at != step:
            self.commit(step)

    def commit(self, step: int) -> None:
        """Remembers the values of all objects before `step`, or in its middle. Copies their tensors."""
        for name, thing in self._objects.items():
            self._committed[name] = copied(value_of(thing), self._committed[name])
        self.committed_at = step

    def restore(self) -> None:
        """Gives the objects the values of the last commit."""
        for name, thing in self._objects.items():
            put(thing, copied(self._committed[name]), _called(name))

    def give_up(self, step: int) -> None:
        """Undoes what has happened to the objects in `step`; what followed the step before it stays."""
        if self.committed_at == step:
            self.restore()

    def pieces(self, step: int) -> list[Piece]:
        """Returns the values of all objects before `step`, also of those that wait for theirs."""
        values = {**(self._waiting if step == self._came_at else {}), **self._values()}
        found = dict[str, Tensor]()
        for name, value in values.items():
            packed, tensors = _split(name, value)
            found |= {_BEFORE + name: torch.frombuffer(bytearray(packed), dtype=torch.uint8), **tensors}
        return [Piece.whole(title, each) for title, each in found.items()]

    def take(self, found: dict[str, Any], step: int, name: str) -> list[str]:
        """Gives the objects their values before `step`, which `values_in` has found in the source of that name. Returns
        a line for each that has none there, and stays as it is."""
        unknown = [f"{name} has no {_called(each)}: it stays as it is" for each in self._objects.keys() - found]
        for each, thing in self._objects.items():
            if each in found:
                put(thing, found.pop(each), _called(each))
        self._waiting, self._came_at = found, step
        self.commit(-1)
        return unknown

    def told_apart(self, everyone: Group) -> list[str]:
        """Returns a line for each object whose values are not the same on all ranks. Collective."""
        told = everyone.all_gather_object({name: _fingerprint(name, value) for name, value in self._values().items()})
        lines = list[str]()
        for name in dict.fromkeys(name for theirs in told for name in theirs):
            others = [rank for rank, theirs in enumerate(told) if theirs.get(name) != told[0].get(name)]
            if others:
                lines.append(
                    f"{_called(name)} is not the same on ranks 0 and {others[0]}: what rank 0 has is saved, and given "
                    "to all ranks when they change. Change it alike on all of them"
                )
        return lines

    def _values(self) -> dict[str, Any]:
        return {name: value_of(thing) for name, thing in self._objects.items()}


def values_in(source: Source) -> dict[str, Any]:
    """Returns all values that `source` has, by name. Collective where the source is."""
    shapes = source.shapes()
    titles = [title for title in shapes if title.startswith(_BEFORE) and "/" not in title]
    packed = _filled(source, {title: torch.empty(shapes[title], dtype=torch.uint8) for title in titles})
    try:
        values = {title.removeprefix(_BEFORE): unpack(each.numpy().tobytes()) for title, each in packed.items()}
    except LaunchError as error:
        raise CheckpointError(f"{source.name}: the state of the caller's own cannot be read: {error}") from error
    beside = [each for value in values.values() for each in tensors_beside(value)]
    tensors = _filled(source, {each.title: torch.empty(each.shape, dtype=each.dtype) for each in beside})
    return {name: joined(value, tensors) for name, value in values.items()}


def _filled(source: Source, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns `tensors` with what `source` has under their titles."""
    if tensors:
        wholes = [(title, tuple(each.shape), each) for title, each in tensors.items()]
        source.load([Want(title, shape, Box.whole(shape), each) for title, shape, each in wholes])
    return tensors


def _split(name: str, value: Any) -> tuple[bytes, Mapping[str, Tensor]]:
    try:
        return split(value, f"{_BEFORE}{name}/")
    except UserError as error:
        raise UserError(f"{_called(name)}: {error}") from error


def _fingerprint(name: str, value: Any) -> list[int]:
    """Returns numbers that two values share only if they are, in all likelihood, the same bits."""
    packed, tensors = _split(name, value)
    return [crc32(packed), combined(tensors.values())]


def _called(name: str) -> str:
    return f"engine.state({name!r})"
