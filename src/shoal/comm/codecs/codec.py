"""What a codec is: flat tensors to bytes for the wire, and back."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """Fixed-size encoding of a contiguous 1-D floating tensor. Without state, but for ErrorFeedback.

    flat, out   fp32, fp64, bf16 or fp16; values are computed in fp32, so fp64 is narrowed to it first
    data        uint8, exactly `encoded_bytes(numel)` of them, at any address, on the device of the tensor

    NaN or Inf in, NaN or Inf out: a non-finite element is never hidden from a check of what was decoded.
    Raises ValueError where a tensor does not fit.
    """

    @property
    def row(self) -> int | None:
        """Cut at multiples of this many elements, the pieces' bytes in order are those of the whole. None: only the whole is encoded."""

    @property
    def lossless(self) -> bool:
        """Whether fp32 comes back bit by bit."""

    def encoded_bytes(self, numel: int) -> int:
        """Bytes of `numel` encoded elements, whatever their values."""

    def encode(self, flat: Tensor, out: Tensor) -> None:
        """Fills the bytes `out` with `flat` encoded."""

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Overwrites `out` with the decoded `data`."""

    def decode_add(self, data: Tensor, out: Tensor, scale: float = 1.0) -> None:
        """out += scale * decoded, summed in the wider of fp32 and the type of `out`."""


BLOCK = 262144
"""Elements that several torch operations pass over in turn: 1 MiB in fp32 stays in cache, and hides what the calls themselves cost."""


def check(codec: Codec, flat: Tensor, data: Tensor) -> None:
    """Raises ValueError unless `data` is what `flat` is encoded to, and both lie as a kernel can read them."""
    if flat.dim() != 1 or not flat.is_contiguous() or not flat.is_floating_point():
        raise ValueError(
            f"a codec takes a contiguous 1-D floating tensor, not {tuple(flat.shape)} {flat.dtype}, stride {flat.stride()}"
        )
    expected = codec.encoded_bytes(flat.numel())
    if data.dtype != torch.uint8 or data.shape != (expected,) or not data.is_contiguous():
        raise ValueError(
            f"{flat.numel()} elements are {expected} contiguous uint8 under {codec}, not {tuple(data.shape)} {data.dtype}"
        )
    if data.device != flat.device:
        raise ValueError(f"the bytes are on {data.device} and the tensor is on {flat.device}: a codec works on one device")


def add(out: Tensor, decoded: Tensor, scale: float) -> None:
    """out += scale * decoded, in the wider of the two types, rounded after each operation."""
    if scale != 1.0:
        decoded = decoded * scale
    wide = torch.promote_types(out.dtype, decoded.dtype)
    if wide == out.dtype:
        out.add_(decoded.to(wide))
    else:
        out.copy_(out.to(wide).add_(decoded))


def as_bytes(values: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, in place."""
    return values.view(torch.uint8)


def as_values(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous bytes as values of `dtype`: in place where their offset allows it, else a copy."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)
