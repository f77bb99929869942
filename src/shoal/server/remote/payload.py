"""Values in messages: nested tuples, lists and dicts of tensors and plain values, as comm/wire.py reads them.

    | structure: where each tensor stands, its dtype and shape, whether it needs a gradient (uint8) | tensors (uint8) |

A tensor that stands in several places travels once, and arrives as one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shoal.comm.flat import as_bytes
from shoal.comm.wire import pack, sent, unpack
from shoal.elastic.records import Malformed
from shoal.errors import LaunchError, UserError
from shoal.server.sessions import Session
from shoal.server.sessions.session import MOST_TENSORS

MOST_STRUCTURE = 1 << 24
"""The most bytes of a structure."""


@sent
@dataclass(frozen=True)
class Place:
    """Stands for the tensor of this number."""

    number: int


class Payload(NamedTuple):
    """A value apart: its structure, with a Place for each tensor; the tensors; whether each needs a gradient."""

    structure: Any
    tensors: list[Tensor]
    needing: list[bool]

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """Returns the value, with these tensors."""
        try:
            return tree_map(lambda leaf: tensors[leaf.number] if isinstance(leaf, Place) else leaf, self.structure)
        except (IndexError, TypeError) as error:
            raise Malformed(f"a structure of other tensors: {error}") from None


def taken_apart(value: Any, grad: bool) -> Payload:
    """Returns `value` apart. `grad`: whether gradients are recorded at all. Raises UserError for tensors that are not
    dense."""
    tensors: list[Tensor] = []
    places: dict[int, Place] = {}

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.layout != torch.strided or leaf.is_quantized:
            raise UserError(f"a {leaf.layout} tensor cannot be sent to or from a remote module: make it dense")
        if id(leaf) not in places:
            places[id(leaf)] = Place(len(tensors))
            tensors.append(leaf)
        return places[id(leaf)]

    structure = tree_map(place, value)
    if len(tensors) >= MOST_TENSORS:
        raise UserError(f"{len(tensors):,} tensors for a remote module at once; the most is {MOST_TENSORS - 1:,}")
    return Payload(structure, tensors, [grad and tensor.requires_grad for tensor in tensors])


NOTHING = taken_apart(None, grad=False)


def written(payload: Payload, device: torch.device | None = None) -> list[Tensor]:
    """Returns a value as the raw tensors of a message; those on the accelerator `device` stay there. Raises
    UserError for what cannot be sent."""
    kinds = [
        [tensor.dtype, list(tensor.shape), needs]
        for tensor, needs in zip(payload.tensors, payload.needing, strict=True)
    ]
    structure = torch.frombuffer(bytearray(pack([payload.structure, kinds])), dtype=torch.uint8)
    if structure.numel() > MOST_STRUCTURE:
        raise UserError(
            f"a value of {structure.numel():,} bytes beside its tensors; the most is {MOST_STRUCTURE:,}: send long "
            "lists of numbers as tensors"
        )
    return [structure, *(_raw(tensor, device) for tensor in payload.tensors)]


def receive(session: Session, most_bytes: int) -> Payload:
    """Returns the value that follows the record received last. Raises Malformed, for more than `most_bytes` before
    memory is taken; SessionLost."""
    if not session.forms or any(form.dtype != torch.uint8 for form in session.forms):
        raise Malformed("a message without a value")
    if session.forms[0].numel > MOST_STRUCTURE or sum(form.numel for form in session.forms) > most_bytes:
        raise Malformed(f"a value of {sum(form.numel for form in session.forms):,} bytes; the most is {most_bytes:,}")
    structure, *raw = session.tensors()
    try:
        value, kinds = unpack(structure.numpy().data)
        found = [_tensor(flat, *kind) for flat, kind in zip(raw, kinds, strict=True)]
        return Payload(value, found, [bool(needs) for _, _, needs in kinds])
    except (LaunchError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise Malformed(f"a value that cannot be read: {error}") from None


def _raw(tensor: Tensor, device: torch.device | None) -> Tensor:
    return as_bytes(tensor if tensor.device == device and tensor.numel() else tensor.cpu())


def _tensor(raw: Tensor, dtype: Any, shape: Any, needs: Any) -> Tensor:
    if not isinstance(dtype, torch.dtype) or any(type(size) is not int or size < 0 for size in shape):
        raise Malformed(f"a tensor {dtype}, {shape}")
    if math.prod(shape) * dtype.itemsize != raw.numel():
        raise Malformed(f"{raw.numel():,} bytes for a tensor {dtype}, {shape}")
    if needs and not (dtype.is_floating_point or dtype.is_complex):
        raise Malformed(f"a gradient of a tensor {dtype}")
    return (raw.view(dtype) if raw.numel() else torch.empty(0, dtype=dtype)).view(shape)
