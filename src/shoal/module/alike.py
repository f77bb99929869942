"""Makes the model equal on all ranks, also if a constructor drew from generators other than the seeded ones."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from shoal.comm import Group
from shoal.errors import UserError
from shoal.module.build import Built


@torch.no_grad()
def make_alike(built: Built, group: Group) -> None:
    """Broadcasts the first rank's values of the tensors that this process made itself (`built.given`), where they
    differ.

    They are all tensors of a ready module, and of a recorded one those that came from elsewhere than torch. Collective
    over `group`. Raises UserError, on every rank, if the ranks have built modules with other tensors.
    """
    if group.size == 1:
        return
    tensors = [tensor for tensor in built.given if tensor.layout == torch.strided and not tensor.is_meta]
    named = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in built.module.named_parameters()]
    shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    structure = hashlib.blake2b(repr((named, shapes)).encode(), digest_size=7).digest()
    if _differing(torch.tensor([int.from_bytes(structure, "little")]), group).any():
        raise UserError(
            "the ranks have built models of other parameters: the constructor must make the same on all of them. "
            "Choices that it takes at random must come from torch's, numpy's or Python's global generator, or from one "
            "that it seeds itself"
        )
    if not tensors:
        return
    for tensor, differs in zip(
        tensors, _differing(torch.stack([_digest(tensor) for tensor in tensors]), group), strict=True
    ):
        if differs:
            tensor.copy_(group.broadcast(tensor.contiguous(), purpose="weights"))


def _differing(numbers: Tensor, group: Group) -> Tensor:
    """Returns a mask of the int64 `numbers` that are not the same on all ranks."""
    least, most = (group.all_reduce(numbers.clone(), op, purpose="weights") for op in ("min", "max"))
    return least != most


def _digest(tensor: Tensor) -> Tensor:
    """Returns a sum over the bits of `tensor` (int64, on the CPU): equal for equal values, and rarely for others."""
    flat = tensor.detach().contiguous().flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    return words.sum(dtype=torch.int64).cpu()
