"""Serialization of values between ranks: JSON, followed by the raw contents of tensors. Reading them cannot run code.

    | bytes of the JSON (u64) | JSON | contents of tensors, arrays and bytes, one after the other |

JSON holds None, bool, int, float, str and lists as they are; anything else is an object with one key, which names the
kind: {"tuple": [...]}, {"tensor": ["float32", [2, 3]]}, {"Shape": [...]}. A dataclass can be sent if it is marked by
`sent`; a named tuple or a node of torch's pytrees (an output of transformers) if the reader has its class too: it looks
names up among what it has loaded, and imports nothing.
"""

from __future__ import annotations

import json
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from shoal.comm.flat import as_bytes
from shoal.errors import LaunchError, ShoalError, UserError

Class = TypeVar("Class", bound=type)

FIRST = 512
"""Bytes of a packed value that ranks exchange at once, without asking for its size: few are longer."""
_SIZE = struct.Struct("=q")
_LENGTH = struct.Struct("!Q")
_PLAIN = (bool, int, float, str)
_ARRAYS = "biufcUSmM"
"""Kinds of numpy dtypes whose bytes mean the same in another process; not "O", which holds addresses."""

_sent: dict[str, tuple[type, Callable[[Any], list[Any]], Callable[..., Any]]] = {}


def sent(kind: Class) -> Class:
    """Registers a dataclass to be sent, by its fields, or by `to_wire() -> list` and `from_wire(*list)`."""
    names = [each.name for each in fields(kind)]

    def fields_of(value: Any) -> list[Any]:
        return [getattr(value, name) for name in names]

    def made(*values: Any) -> Any:
        return kind(**dict(zip(names, values, strict=True)))

    assert kind.__name__ not in _sent and kind.__name__ not in _READERS, (
        f"something else that travels is called {kind.__name__}"
    )
    _sent[kind.__name__] = kind, getattr(kind, "to_wire", fields_of), getattr(kind, "from_wire", made)
    return kind


def pack(value: Any) -> bytes:
    """Serializes `value`. Raises UserError that names the type of what cannot be sent, and where in the value it is."""
    raw: list[bytes] = []
    head = json.dumps(_written(value, raw, "")).encode()
    return b"".join([_LENGTH.pack(len(head)), head, *raw])


def unpack(data: bytes | memoryview) -> Any:
    """Returns the value that `pack` was given; tensors own their memory. Raises LaunchError for malformed `data`."""
    view = memoryview(data)
    try:
        (length,) = _LENGTH.unpack_from(view)
        start = _LENGTH.size + length
        raw = _Raw(view[start:])
        value = json.loads(bytes(view[_LENGTH.size : start]), object_hook=partial(_made, raw=raw))
        if raw.rest:
            raise ValueError(f"{len(raw.rest)} bytes more than it says")
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        OverflowError,
        RecursionError,
        RuntimeError,
        struct.error,
    ) as error:
        raise LaunchError(
            f"a message between ranks cannot be read ({type(error).__name__}: {error}): do all ranks run the same "
            "version of Shoal?"
        ) from error
    return value


def packed(value: Any) -> Tensor:
    """Serializes `value` for a collective: returns its size (int64) and its bytes, as uint8, padded to FIRST.

    Where the value cannot be sent, the bytes are those of the error and the size is negative: `unpacked` raises it on
    every rank.
    """
    try:
        data, sign = pack(value), 1
    except Exception as error:
        data, sign = pack(error), -1
    whole = _SIZE.pack(sign * len(data)) + data
    return torch.frombuffer(bytearray(whole.ljust(FIRST, b"\0")), dtype=torch.uint8)


def rest_of(first: Tensor) -> int:
    """Returns how many bytes a `packed` value has beside its FIRST ones, which begin `first`."""
    return max(0, _SIZE.size + abs(_size_of(first)) - FIRST)


def is_error(first: Tensor) -> bool:
    """Returns whether what is `packed` is why a value cannot be sent."""
    return _size_of(first) < 0


def unpacked(data: Tensor) -> Any:
    """Returns the value that `packed` was given, or raises its error. `data` may be longer."""
    size = _size_of(data)
    value = unpack(data[_SIZE.size : _SIZE.size + abs(size)].numpy().tobytes())
    if size < 0:
        raise value
    return value


def _size_of(data: Tensor) -> int:
    return int(_SIZE.unpack(data[: _SIZE.size].numpy().tobytes())[0])


def _written(value: Any, raw: list[bytes], where: str) -> Any:
    """Returns `value` as JSON; appends contents of tensors to `raw`. `where`: path in the value, for messages."""
    kind = type(value)
    if value is None or kind in _PLAIN:
        return value
    if kind is list:
        return [_written(item, raw, f"{where}[{index}]") for index, item in enumerate(value)]
    if kind is dict:
        items = [[_written(key, raw, where), _written(item, raw, f"{where}[{key!r}]")] for key, item in value.items()]
        return {"dict": items}
    if kind in _SEQUENCES:
        return {_SEQUENCES[kind]: [_written(item, raw, f"{where}[{index}]") for index, item in enumerate(value)]}
    if kind is bytes:
        raw.append(value)
        return {"bytes": len(value)}
    if isinstance(value, torch.dtype | torch.device | Path):
        name = "path" if isinstance(value, Path) else kind.__name__
        return {name: str(value).removeprefix("torch.")}
    if kind in (Tensor, torch.nn.Parameter):
        return _tensor_written(value, raw, where)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _ARRAYS:
        raw.append(value.tobytes())
        return {"array" if isinstance(value, np.ndarray) else "number": [value.dtype.str, list(value.shape)]}
    if isinstance(value, ShoalError):
        return {"error": [kind.__name__, str(value), _written(vars(value), raw, where)]}
    if isinstance(value, Exception):
        return {"error": ["", f"{kind.__name__}: {value}", _written({}, raw, where)]}
    if kind.__name__ in _sent and _sent[kind.__name__][0] is kind:
        return {
            kind.__name__: [_written(item, raw, f"{where}.{kind.__name__}") for item in _sent[kind.__name__][1](value)]
        }
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [_written(item, raw, f"{where}.{name}") for name, item in zip(value._fields, value, strict=True)]
        return {"namedtuple": [kind.__module__, kind.__qualname__, items]}
    if kind in SUPPORTED_NODES and kind is not defaultdict:  # whose factory may be anything
        children, tree = tree_flatten(value, is_leaf=lambda part: part is not value)
        return {
            "node": [treespec_dumps(tree), [_written(child, raw, f"{where}.{kind.__name__}") for child in children]]
        }
    if isinstance(value, Mapping):  # such as what a tokenizer of transformers gives; it arrives as a dict
        return _written(dict(value), raw, where)
    raise UserError(
        f"a value of type {kind.__module__}.{kind.__qualname__}{f' (at {where})' if where else ''} cannot be sent to "
        "other ranks: they take None, numbers, texts, bytes, tensors, arrays, and lists, tuples, sets and dicts of "
        "them. Turn it into those"
    )


def _tensor_written(tensor: Tensor, raw: list[bytes], where: str) -> dict[str, Any]:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UserError(
            f"a {tensor.layout} tensor{f' (at {where})' if where else ''} cannot be sent to other ranks: make it dense"
        )
    raw.append(as_bytes(tensor.cpu()).numpy().tobytes())
    return {"tensor": [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]}


_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}


class _Raw:
    """The raw contents that have not been read yet."""

    def __init__(self, rest: memoryview) -> None:
        self.rest = rest

    def take(self, count: int) -> bytearray:
        if not 0 <= count <= len(self.rest):
            raise ValueError(f"{count} bytes of {len(self.rest)}")
        found, self.rest = bytearray(self.rest[:count]), self.rest[count:]
        return found


def _made(said: dict[str, Any], raw: _Raw) -> Any:
    """Returns what an object of the JSON stands for. The decoder asks inside out and in the order of the text, so what
    `said` contains is made already, and contents are taken from `raw` in the order in which they were written."""
    ((kind, content),) = said.items()
    if kind in _READERS:
        return _READERS[kind](content, raw)
    return _sent[kind][2](*content)


def _tensor_read(said: Any, raw: _Raw) -> Tensor:
    dtype, shape = _dtype(said[0]), [_size(each) for each in said[1]]
    data = raw.take(dtype.itemsize * int(np.prod(shape, dtype=object)))
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)


def _array_read(said: Any, raw: _Raw) -> np.ndarray:
    dtype, shape = np.dtype(said[0]), [_size(each) for each in said[1]]
    if dtype.kind not in _ARRAYS:
        raise ValueError(f"an array of {dtype}")
    return np.frombuffer(raw.take(dtype.itemsize * int(np.prod(shape, dtype=object))), dtype).reshape(shape)


def _size(said: Any) -> int:
    if type(said) is not int or said < 0:
        raise ValueError(f"a size of {said!r}")
    return said


def _dtype(said: Any) -> torch.dtype:
    found = getattr(torch, said)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{said!r} is no dtype")
    return found


def _namedtuple_read(said: Any, raw: _Raw) -> tuple:
    module, name, items = said
    kind: Any = sys.modules[module]
    for part in name.split("."):
        kind = vars(kind)[part]  # not getattr, by which some modules import
    if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise ValueError(f"{module}.{name} is no named tuple")
    return tuple.__new__(kind, items)


def _node_read(said: Any, raw: _Raw) -> Any:
    """Reads a pytree node of one level, unless its description names something to import."""
    tree, children = said
    about = json.loads(tree)[1]
    if about["type"] == "collections.defaultdict" or any(child["type"] for child in about["children_spec"]):
        raise ValueError(f"a node {tree}")
    return tree_unflatten(children, treespec_loads(tree))


def _error_read(said: Any, raw: _Raw) -> Exception:
    """Makes an error without its constructor, which may want other arguments than the message."""
    name, message, state = said
    error: Exception = RuntimeError(message)
    if name:
        kind = _shoal_errors()[name]
        error = kind.__new__(kind)
        error.args = (message,)
    vars(error).update(state)
    return error


def _shoal_errors() -> dict[str, type[ShoalError]]:
    kinds, found = [ShoalError], dict[str, type[ShoalError]]()
    while kinds:
        kind = kinds.pop()
        found[kind.__name__] = kind
        kinds += kind.__subclasses__()
    return found


_READERS: dict[str, Callable[[Any, _Raw], Any]] = {
    "dict": lambda said, raw: dict(said),
    "tuple": lambda said, raw: tuple(said),
    "set": lambda said, raw: set(said),
    "frozenset": lambda said, raw: frozenset(said),
    "size": lambda said, raw: torch.Size(_size(item) for item in said),
    "namedtuple": _namedtuple_read,
    "node": _node_read,
    "bytes": lambda said, raw: bytes(raw.take(_size(said))),
    "tensor": _tensor_read,
    "array": _array_read,
    "number": lambda said, raw: _array_read(said, raw)[()],
    "dtype": lambda said, raw: _dtype(said),
    "device": lambda said, raw: torch.device(said),
    "path": lambda said, raw: Path(said),
    "error": _error_read,
}
