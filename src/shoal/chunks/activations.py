"""What backward keeps of the forward, counted in a tier as it comes and goes."""

from __future__ import annotations

import weakref

from torch import Tensor

from shoal.chunks.tier import Tier

ROLE = "activations"


class Activations:
    """Counts storages in `tier` from the first tensor of them that autograd saves until the last such one is freed."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._saved: dict[int, int] = {}  # how many saved tensors a storage has

    def keep(self, tensor: Tensor) -> None:
        """`tensor` is saved for backward, as this very object."""
        storage = tensor.untyped_storage()
        place, size = storage._cdata, storage.nbytes()
        if place not in self._saved:
            self._tier.take(ROLE, size, "what backward keeps")
            self._saved[place] = 0
        self._saved[place] += 1
        weakref.finalize(tensor, self._free, place, size).atexit = False

    def _free(self, place: int, size: int) -> None:
        self._saved[place] -= 1
        if not self._saved[place]:
            del self._saved[place]
            self._tier.give(ROLE, size)
