"""Tensors of any shape and strides as the contiguous 1-D tensors that transports take, and back."""

from __future__ import annotations

from torch import Tensor


def flat_of(tensor: Tensor) -> Tensor:
    """The elements in a row: a view where they lie so, else a copy (see `write_back`). Detached: leaves may be written."""
    if tensor.dim() == 1 and not tensor.requires_grad and tensor.is_contiguous():
        return tensor  # as most are, and a small operation feels three calls of torch
    return tensor.detach().contiguous().view(-1)


def write_back(tensor: Tensor, flat: Tensor) -> Tensor:
    """Gives `tensor` the values of its flat form, unless they share their memory; returns it."""
    if tensor is not flat and _place(tensor) != _place(flat):
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def _place(tensor: Tensor) -> tuple[int, int]:
    """Where it begins; fake tensors have such a place, too, and no address."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
