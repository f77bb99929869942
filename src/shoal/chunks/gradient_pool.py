"""Whole gradients on loan, for chunks that keep their stretch of it only (ZeRO 2, 3): no more than are being filled and
reduced.

Turns count the reductions, in the same order on all ranks. Where the ranks share memory, two buffers there take turns,
so that what is reduced lies where all ranks see it: turn t has buffer t mod 2 once turn t - 2 has ended. A gradient
that comes before that is collected in memory of this rank's own, and copied when its turn comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from shoal.chunks.allocate import Shared
from shoal.chunks.tier import Tier
from shoal.comm.lane import EXCHANGE, Ticket
from shoal.device import is_accelerator

BUFFERS = 2
ON_LOAN = "gradients on loan"
"""Role of these gradients in the tier."""


class GradientPool:
    """Lends flat tensors of `dtype` on `device`, of at most `size` elements.

    At most BUFFERS are on their way at a time, one of them being filled, beside those that are filled in several parts
    of backward.

    - `shared`: allocates on all ranks together
    - `tier`: where loans are counted; with a tier no memory is shared
    - `buffers`: the memory that all ranks see
    - `bytes_home`: bytes of reduced stretches that went to the host
    """

    def __init__(
        self, size: int, dtype: torch.dtype, device: torch.device, shared: Shared, tier: Tier | None = None
    ) -> None:
        self._dtype, self._device, self._tier = dtype, device, tier
        self.buffers = shared.buffers(BUFFERS, size, dtype) if tier is None else []
        self._ended = 0
        self.bytes_home = 0
        # Handed over, and not waited for yet; kept until then, so that the next gradient can have their memory: what
        # `record_stream` keeps is given on only once the host has seen that the lane is done.
        self._loans: deque[tuple[Ticket, Tensor]] = deque()

    def borrow(self, turn: int, numel: int) -> Tensor:
        """Lends `numel` elements, uninitialised, for the gradient that is reduced in `turn`."""
        while len(self._loans) >= BUFFERS:
            self._take_back(ON_LOAN)
        if self.buffers and turn - self._ended < BUFFERS:
            return self.buffers[turn % BUFFERS][:numel]
        if self._tier is not None:
            self._tier.take(ON_LOAN, numel * self._dtype.itemsize, "the gradient of a chunk")
        return torch.empty(numel, dtype=self._dtype, device=self._device)

    def to_reduce(self, turn: int, flat: Tensor) -> Tensor:
        """Returns `flat` in memory that all ranks see, where there is such; called on the lane, in `turn`."""
        if not self.buffers:
            return flat
        buffer = self.buffers[turn % BUFFERS][: flat.numel()]
        return buffer if buffer.data_ptr() == flat.data_ptr() else buffer.copy_(flat)

    def end(self, turn: int, home: int) -> None:
        """Frees the buffer of `turn`; `home` bytes of what it held went to the host. Called on the lane."""
        self._ended = turn + 1
        self.bytes_home += home

    def handed_over(self, ticket: Ticket, flat: Tensor) -> None:
        """Notes that `flat` was given to the lane, which is done with it at `ticket`."""
        self._loans.append((ticket, flat))

    def forget(self, lent: Iterable[Tensor]) -> None:
        """Takes back what is `lent` and what was handed over, once the lane is done with all of it: an error cut the
        step short."""
        for flat in (*lent, *(flat for _, flat in self._loans)):
            if self._tier is not None:
                self._tier.give(ON_LOAN, flat.nbytes)
        self._loans.clear()

    def settle(self) -> None:
        """Waits for all that was handed over."""
        while self._loans:
            self._take_back(EXCHANGE)

    def _take_back(self, cause: str) -> None:
        ticket, flat = self._loans.popleft()
        if self._tier is not None:
            self._tier.give(ON_LOAN, flat.nbytes)
        ticket.wait(cause)


def bring_home(new: Tensor, home: Tensor, adds: bool, end: Callable[[Tensor], None] | None = None) -> bool:
    """Copies the reduced stretch `new` to `home`, or adds it to what came before; returns whether `new` then holds the
    sum as well. `end`: what is done to the sum, in place. Called on the lane: what goes from an accelerator to the host
    does so in the order of its stream, without a wait of the host."""
    away = is_accelerator(new.device) and home.is_cpu
    total, other = (new, home) if away else (home, new)
    if adds:
        total.add_(other.to(total.device, non_blocking=True))
    elif not away:
        home.copy_(new)
    if end is not None:
        end(total)
    if away:
        home.copy_(new, non_blocking=True)
    return away
