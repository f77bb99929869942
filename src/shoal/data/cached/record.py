"""Samples as bytes: a safetensors file whose header has the values that are not tensors. Nothing in it is executable.

    sealed  | index (u64) | payload bytes (u64) | crc32 of both and the payload (u32) | 0 (u32) | payload ... |

The seal shows whether a record is complete and belongs to its index.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError

HEADER = struct.Struct("<QQI4x")
_NUMBERS = struct.Struct("<QQ")


def pack(sample: Any) -> bytes:
    """Serialises a dict of tensors, arrays, numbers, strings and None. Raises UserError, with the key, for others."""
    from safetensors.torch import save  # the engine runs where only torch is installed

    if not isinstance(sample, Mapping):
        raise UserError(
            f"a sample is a {type(sample).__name__}, not a dict: only dicts of tensors, arrays and numbers are cached"
        )
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    kinds: dict[str, str] = {}  # in the order of the sample
    for key, value in sample.items():
        if not isinstance(key, str):
            raise UserError(f"a sample has the key {key!r}: only text is taken for keys of cached samples")
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.device.type != "cpu":
                raise UserError(
                    f"sample[{key!r}] is a {value.layout} tensor on {value.device}: cache dense tensors on the CPU"
                )
            kinds[key], tensors[key] = "tensor", value.detach().clone(memory_format=torch.contiguous_format)
        elif isinstance(value, np.ndarray | np.number | np.bool_) and value.dtype.kind in "biufc":
            kinds[key] = "array" if isinstance(value, np.ndarray) else "scalar"
            tensors[key] = _as_tensor(key, value)
        elif value is None or isinstance(value, bool | int | float | str):
            kinds[key], plain[key] = "plain", value
        else:
            raise UserError(
                f"sample[{key!r}] is a {type(value).__name__}: cache tensors, arrays, numbers and strings, and make "
                "the rest of them after the cache"
            )
    try:
        return save(tensors, {"kinds": json.dumps(kinds), "plain": json.dumps(plain)})
    except KeyError as error:
        raise UserError(
            f"a sample holds {error}, which safetensors do not have: convert it before the cache"
        ) from error


def _as_tensor(key: str, value: Any) -> Tensor:
    try:
        return torch.from_numpy(np.array(value, order="C"))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"sample[{key!r}] has dtype {value.dtype}, which torch does not have: convert it before the cache"
        ) from error


def unpack(payload: bytes) -> dict[str, Any] | None:
    """Deserialises a sample of `pack`, with new tensors and arrays. Returns None for any other bytes, since whoever
    reaches a server may write anything there."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        (length,) = struct.unpack_from("<Q", payload)
        about = json.loads(payload[8 : 8 + length])["__metadata__"]
        tensors, plain = load(payload), json.loads(about["plain"])
        return {
            key: _as_it_was(kind, tensors.get(key), plain.get(key)) for key, kind in json.loads(about["kinds"]).items()
        }
    except (SafetensorError, struct.error, ValueError, TypeError, LookupError):
        return None
    except (AttributeError, OverflowError, RecursionError):
        return None


def _as_it_was(kind: str, tensor: Tensor | None, plain: Any) -> Any:
    if tensor is None:
        return plain
    return tensor if kind == "tensor" else tensor.numpy() if kind == "array" else tensor.numpy()[()]


def seal(index: int, payload: bytes) -> bytes:
    """Prefixes `payload` with a header for `opened`: index, length and checksum."""
    return HEADER.pack(index, len(payload), _checksum(index, payload)) + payload


def opened(index: int, record: bytes | memoryview) -> bytes | None:
    """Returns the payload of `record`, or None if that is not an intact record of sample `index`."""
    if len(record) < HEADER.size:
        return None
    whose, length, checksum = HEADER.unpack_from(record)
    payload = bytes(record[HEADER.size : HEADER.size + length]) if whose == index else b""
    intact = whose == index and len(payload) == length and _checksum(index, payload) == checksum
    return payload if intact else None


def _checksum(index: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_NUMBERS.pack(index, len(payload))))
