"""The mean of what clients send, as it comes: memory for one sum, however many there are."""

from __future__ import annotations

import torch
from torch import Tensor


class Aggregate:
    """A weighted sum of movements of `size` elements, in fp64, so that it hardly depends on their order."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._sum = torch.zeros(size, dtype=torch.float64, device=device)
        self._weight, self.results = 0.0, 0

    def add(self, moved: Tensor, weights: Tensor, factors: Tensor) -> None:
        """Adds movements [n, size] with their `weights` [n]. A factor below 1 (stale results) makes a movement smaller
        and leaves the weight of the others as it is."""
        weighted = weights.double()
        self._sum.addmv_(moved.double().t(), weighted * factors.double())
        self._weight += float(weighted.sum())
        self.results += len(moved)

    def mean(self, dtype: torch.dtype) -> Tensor:
        """Returns the weighted mean."""
        return (self._sum / self._weight).to(dtype)
