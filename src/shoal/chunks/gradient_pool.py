"""Whole gradients on loan, for chunks that keep only their stretch of it (ZeRO 2): as many as are being filled and reduced, no more.

Turns count the reductions, in their order, on all ranks alike. Where the ranks share memory, two buffers there take turns, so that what is
reduced lies where all ranks see it: turn t has buffer t mod 2 once turn t - 2 has ended. A gradient that comes before that is collected in
memory of this rank's own and copied when its turn comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from shoal.chunks.allocate import Shared
from shoal.chunks.tier import Tier
from shoal.comm.lane import EXCHANGE, Ticket

BUFFERS = 2
ON_LOAN = "gradients on loan"
"""Their role in the tier."""


class Lender:
    """Lends flat tensors of `dtype` on `device`, of at most `size` elements; at most BUFFERS are on their way at a time, one of them being filled, beside
    those that are filled in several parts of backward. `shared` allocates alike on all ranks. `tier`: where they are counted; in a tier no memory is shared.
    `bytes_home`: of stretches that went from there to the host."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, shared: Shared, tier: Tier | None = None) -> None:
        self._dtype, self._device, self._tier = dtype, device, tier
        self._buffers = shared.buffers(BUFFERS, size, dtype) if tier is None else []
        self._ended = 0
        self.bytes_home = 0
        self._loans: deque[tuple[Ticket, int]] = deque()  # handed over, and not waited for yet

    def borrow(self, turn: int, numel: int) -> Tensor:
        """Uninitialised, for the gradient that is reduced in `turn`."""
        while len(self._loans) >= BUFFERS:
            self._take_back(ON_LOAN)
        if self._buffers and turn - self._ended < BUFFERS:
            return self._buffers[turn % BUFFERS][:numel]
        if self._tier is not None:
            self._tier.take(ON_LOAN, numel * self._dtype.itemsize, "the gradient of a chunk")
        return torch.empty(numel, dtype=self._dtype, device=self._device)

    def to_reduce(self, turn: int, flat: Tensor) -> Tensor:
        """On the lane, in `turn`: `flat` as all ranks see it, or as it is where they share no memory."""
        if flat.is_cuda:
            flat.record_stream(torch.cuda.current_stream())  # it was made on the stream of the backward
        if not self._buffers:
            return flat
        buffer = self._buffers[turn % BUFFERS][: flat.numel()]
        return buffer if buffer.data_ptr() == flat.data_ptr() else buffer.copy_(flat)

    def end(self, turn: int, home: int) -> None:
        """On the lane: the buffer of `turn` may be filled again; `home` bytes of what it held are on the host."""
        self._ended = turn + 1
        self.bytes_home += home

    def handed_over(self, ticket: Ticket, flat: Tensor) -> None:
        """`flat` was given to the lane; it ends with `ticket`."""
        self._loans.append((ticket, flat.nbytes))

    def forget(self, lent: Iterable[Tensor]) -> None:
        """Nobody will hand over what is `lent` yet, or wait for what was handed over."""
        for flat in lent:
            if self._tier is not None:
                self._tier.give(ON_LOAN, flat.nbytes)
        while self._loans:
            _, size = self._loans.popleft()
            if self._tier is not None:
                self._tier.give(ON_LOAN, size)

    def settle(self) -> None:
        """Waits for all that was handed over."""
        while self._loans:
            self._take_back(EXCHANGE)

    def _take_back(self, cause: str) -> None:
        ticket, size = self._loans.popleft()
        if self._tier is not None:
            self._tier.give(ON_LOAN, size)
        ticket.wait(cause)
