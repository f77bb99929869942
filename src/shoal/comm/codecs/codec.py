"""The protocol of a codec: flat tensors to bytes for the wire, and back."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """Fixed-size encoding of a contiguous 1-D floating tensor; stateless, except for ErrorFeedback.

        flat, out   fp32, fp64, bf16 or fp16; values are computed in fp32, so fp64 is narrowed to it first
        data        uint8, exactly `encoded_bytes(numel)` of them, at any address, on the device of the tensor

    NaN or Inf in gives NaN or Inf out, so a check of the decoded values sees every non-finite element. Raises
    ValueError where a tensor does not fit.
    """

    @property
    def row(self) -> int | None:
        """Number of elements at whose multiples a tensor may be cut: joined, the pieces' bytes are the whole's.

        None: only the whole tensor can be encoded.
        """

    @property
    def lossless(self) -> bool:
        """Whether fp32 values come back bit by bit."""

    def encoded_bytes(self, numel: int) -> int:
        """Returns the bytes of `numel` encoded elements, whatever their values."""

    def encode(self, flat: Tensor, out: Tensor) -> None:
        """Encodes `flat` into the bytes `out`."""

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Overwrites `out` with the decoded `data`."""

    def decode_add(self, data: Tensor, out: Tensor, scale: float = 1.0) -> None:
        """Adds scale * decoded to `out`, in the wider of fp32 and the dtype of `out`."""


BLOCK = 262144
"""Elements over which torch operations pass in turn: 1 MiB in fp32 stays in cache and hides call overhead."""


def check(codec: Codec, flat: Tensor, data: Tensor) -> None:
    """Raises ValueError unless `data` has the size of `flat` encoded, and both lie as a kernel can read them."""
    if flat.dim() != 1 or not flat.is_contiguous() or not flat.is_floating_point():
        raise ValueError(
            f"a codec takes a contiguous 1-D floating tensor, not {tuple(flat.shape)} {flat.dtype}, "
            f"stride {flat.stride()}"
        )
    expected = codec.encoded_bytes(flat.numel())
    if data.dtype != torch.uint8 or data.shape != (expected,) or not data.is_contiguous():
        raise ValueError(
            f"{flat.numel()} elements are {expected} contiguous uint8 under {codec}, "
            f"not {tuple(data.shape)} {data.dtype}"
        )
    if data.device != flat.device:
        raise ValueError(
            f"the bytes are on {data.device} and the tensor is on {flat.device}: a codec works on one device"
        )


def add(out: Tensor, decoded: Tensor, scale: float) -> None:
    """Adds scale * decoded to `out`, in the wider of the two dtypes, rounded after each operation."""
    if scale != 1.0:
        decoded = decoded * scale
    wide = torch.promote_types(out.dtype, decoded.dtype)
    if wide == out.dtype:
        out.add_(decoded.to(wide))
    else:
        out.copy_(out.to(wide).add_(decoded))


def as_values(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns contiguous bytes as values of `dtype`: a view where their offset allows it, else a copy."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)
