"""Conversion of tensors of any shape and strides to the contiguous 1-D tensors that transports take, and back."""

from __future__ import annotations

import torch
from torch import Tensor


def flat_of(tensor: Tensor) -> Tensor:
    """Returns the elements as a contiguous 1-D tensor: a view where possible, else a copy (see `write_back`).

    The result is detached, so that leaves can be written.
    """
    if tensor.dim() == 1 and not tensor.requires_grad and tensor.is_contiguous() and not tensor.is_conj():
        return tensor  # most are flat already, and the calls of torch would slow down a small operation
    return tensor.detach().resolve_conj().contiguous().view(-1)


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the bits of a dense tensor as bytes (1-D): a view where it is contiguous, else a copy.

    One element counts as contiguous whatever its stride is, as in the gradient of a sum, but torch views as bytes only
    what has the stride 1.
    """
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def write_back(tensor: Tensor, flat: Tensor) -> Tensor:
    """Copies the values of `flat` into `tensor`, unless they share memory; returns `tensor`."""
    if tensor is not flat and _place(tensor) != _place(flat):
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def _place(tensor: Tensor) -> tuple[int, int]:
    """Identifies the tensor's first element. Fake tensors have no address, but they have this."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
