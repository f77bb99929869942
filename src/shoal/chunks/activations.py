"""Counts activations, the tensors that autograd saves for backward, in a tier as they come and go."""

from __future__ import annotations

import weakref

from torch import Tensor

from shoal.chunks.tier import Tier

ROLE = "activations"


class Activations:
    """Counts a storage in `tier` from the first tensor of it that autograd saves until the last such one is freed."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._saved: dict[int, int] = {}  # how many saved tensors a storage has

    def keep(self, tensor: Tensor) -> None:
        """Counts `tensor`, which is saved for backward as this very object."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._saved:
            self._tier.take(ROLE, size, "what backward keeps")
            self._saved[key] = 0
        self._saved[key] += 1
        weakref.finalize(tensor, self._free, key, size).atexit = False

    def _free(self, key: int, size: int) -> None:
        self._saved[key] -= 1
        if not self._saved[key]:
            del self._saved[key]
            self._tier.give(ROLE, size)
