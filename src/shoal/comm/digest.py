"""A hash of the bits of tensors, taken on their device: two that differ are told apart without being sent."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shoal.comm.flat import as_bytes

_BLOCK = 1 << 18
"""Words of 64 bits that are hashed at once: temporary memory of 2 MiB."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""The golden ratio in 64 bits, as int64: neighbouring words get factors that have little in common."""


def combined(tensors: Iterable[Tensor]) -> int:
    """Returns a hash of several tensors in their order, 64 bits."""
    total = 0
    for each in [digest(tensor) for tensor in tensors]:  # all are under way before the first is waited for
        total = (total * _ODD + int(each)) % (1 << 64)
    return total


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Returns a hash of the bits of a tensor, int64 (0-dim) on its device.

    The sum of the 64-bit words, each times an odd factor of its place, block by block. A single bit that differs, or
    several in one word, always change it.
    """
    flat = as_bytes(tensor)
    whole = flat.numel() // 8 * 8
    words, rest = flat[:whole], flat.new_zeros(8)
    rest[: flat.numel() - whole] = flat[whole:]
    if words.storage_offset() % 8:
        words = words.clone()
    factors = (2 * torch.arange(min(_BLOCK, whole // 8), device=flat.device) + 1) * _ODD
    total = rest.view(torch.int64)[0] * _ODD
    for block in words.view(torch.int64).split(_BLOCK):
        total = total * _ODD + (block * factors[: block.numel()]).sum()
    return total
