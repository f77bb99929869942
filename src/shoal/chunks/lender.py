"""Whole gradients on loan, for chunks that keep only their stretch of it (ZeRO 2): as many as are being filled and reduced, no more.

Turns count the reductions, in their order, on all ranks alike. Where the ranks share memory, two buffers there take turns, so that what is
reduced lies where all ranks see it: turn t has buffer t mod 2 once turn t - 2 has ended. A gradient that comes before that is collected in
memory of this rank's own and copied when its turn comes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.chunks.allocate import Shared

BUFFERS = 2


class Lender:
    """Lends flat tensors of `dtype` on `device`, of at most `size` elements. `shared` allocates alike on all ranks."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, shared: Shared) -> None:
        self._dtype, self._device = dtype, device
        self._buffers = shared.buffers(BUFFERS, size, dtype)
        self._ended = 0

    def borrow(self, turn: int, numel: int) -> Tensor:
        """Uninitialised, for the gradient that is reduced in `turn`."""
        if self._buffers and turn - self._ended < BUFFERS:
            return self._buffers[turn % BUFFERS][:numel]
        return torch.empty(numel, dtype=self._dtype, device=self._device)

    def to_reduce(self, turn: int, flat: Tensor) -> Tensor:
        """On the lane, in `turn`: `flat` as all ranks see it, or as it is where they share no memory."""
        if flat.is_cuda:
            flat.record_stream(torch.cuda.current_stream())  # it was made on the stream of the backward
        if not self._buffers:
            return flat
        buffer = self._buffers[turn % BUFFERS][: flat.numel()]
        return buffer if buffer.data_ptr() == flat.data_ptr() else buffer.copy_(flat)

    def end(self, turn: int) -> None:
        """On the lane: the buffer of `turn` may be filled again."""
        self._ended = turn + 1
