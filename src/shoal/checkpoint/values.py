"""The values of a caller's objects: taken out, copied, put back, and cut into bytes and tensors for a checkpoint.

Bytes are those of `wire`: numbers, texts, arrays and containers of them. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.comm.wire import pack, sent
from shoal.errors import UserError


@sent
@dataclass(frozen=True)
class TensorBeside:
    """Stands for a tensor that is saved beside the bytes, under `title`."""

    title: str
    shape: list[int]
    dtype: torch.dtype


def check_holds(thing: Any, what: str) -> None:
    """Raises UserError for an object whose values cannot be taken out and put back. `what`: its name in messages."""
    stateful = all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))
    if isinstance(thing, type) or not (stateful or is_dataclass(thing) or isinstance(thing, _CHANGED_IN_PLACE)):
        raise UserError(
            f"{what} got a {type(thing).__name__}: give an object with state_dict() and load_state_dict(), or a dict, "
            'a list, a dataclass, a tensor or an array; of a number or a text a dict that holds it: {"best": 0.5}'
        )
    dataclass_options = getattr(type(thing), "__dataclass_params__", None)
    if not stateful and dataclass_options is not None and dataclass_options.frozen:
        raise UserError(f"{what} got a frozen {type(thing).__name__}, which cannot be put back: leave frozen=True out")


def value_of(thing: Any) -> Any:
    """Returns the values of an object, which may share memory with it."""
    if hasattr(thing, "state_dict"):
        return thing.state_dict()
    if is_dataclass(thing):
        return {each.name: getattr(thing, each.name) for each in fields(thing)}
    return thing


def put(thing: Any, value: Any, what: str) -> None:
    """Gives an object the `value` that `value_of` has returned, in place. The object may keep parts of `value`.

    Raises UserError where a tensor or an array has another shape or dtype.
    """
    if hasattr(thing, "load_state_dict"):
        thing.load_state_dict(value)
    elif is_dataclass(thing):
        for name, each in value.items():
            setattr(thing, name, _within(getattr(thing, name, None), each))
    elif _within(thing, value) is not thing:
        raise UserError(f"{what} is a {_form(thing)} here, and was a {_form(value)} when it was saved")


def copied(value: Any, into: Any = None) -> Any:
    """Returns a copy of `value`. `into`: an older copy, whose tensors are written again where they fit."""
    if isinstance(value, Tensor):
        value = value.detach()
        fits = isinstance(into, Tensor) and (into.shape, into.dtype) == (value.shape, value.dtype)
        return into.copy_(value) if fits and into.device == value.device else value.clone()
    if isinstance(value, dict):
        old = into if isinstance(into, dict) else {}
        return {key: copied(each, old.get(key)) for key, each in value.items()}
    if type(value) in (list, tuple):
        older = into if type(into) is type(value) else ()
        return type(value)(copied(each, old) for each, old in zip_longest(value, older[: len(value)]))
    return deepcopy(value)


def split(value: Any, before: str) -> tuple[bytes, dict[str, Tensor]]:
    """Returns `value` as bytes, and the tensors that these do not contain, by titles that begin with `before`.

    Raises UserError for what cannot be saved, with its type and place.
    """
    tensors = dict[str, Tensor]()

    def take_out(value: Any, path: tuple[str, ...]) -> Any:
        if type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
            title = before + ".".join(path)
            while title in tensors:  # {"a.b": ...} beside {"a": {"b": ...}}
                title += "'"
            tensors[title] = value.detach()
            return TensorBeside(title, list(value.shape), value.dtype)
        return _each(value, path, take_out)

    return pack(take_out(value, ())), tensors


def tensors_beside(value: Any) -> list[TensorBeside]:
    """Returns what stands for tensors in `value`."""
    found = list[TensorBeside]()

    def look(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, TensorBeside):
            found.append(value)
        return _each(value, path, look)

    look(value, ())
    return found


def joined(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns `value` with the tensors put in."""

    def put_in(value: Any, path: tuple[str, ...]) -> Any:
        return tensors[value.title] if isinstance(value, TensorBeside) else _each(value, path, put_in)

    return put_in(value, ())


def _each(value: Any, path: tuple[str, ...], change: Callable[[Any, tuple[str, ...]], Any]) -> Any:
    """Returns a container with `change(item, path)` of its items; anything else as it is."""
    if isinstance(value, dict):
        return {key: change(each, (*path, str(key))) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(each, (*path, str(index))) for index, each in enumerate(value))
    return value


def _within(old: Any, new: Any) -> Any:
    """Returns the value `new`: `old` itself where that can take it, so that others who refer to it see the change."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        if _form(old) != _form(new):
            return new.to(old.device)
        old.detach().copy_(new)
    elif isinstance(old, np.ndarray) and _form(old) == _form(new):
        old[...] = new
    elif isinstance(old, dict) and isinstance(new, dict):
        items = {key: _within(old.get(key), each) for key, each in new.items()}
        old.clear()
        old.update(items)
    elif type(old) is list and type(new) is list:
        old[:] = [_within(each, value) for value, each in zip_longest(new, old[: len(new)])]
    else:
        return new
    return old


def _form(value: Any) -> str:
    about = f" of {value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor | np.ndarray) else ""
    return ("Tensor" if isinstance(value, Tensor) else type(value).__name__) + about


_CHANGED_IN_PLACE = (dict, list, Tensor, np.ndarray)
