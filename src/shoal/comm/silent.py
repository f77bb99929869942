"""A transport that carries nothing: for dry runs that count traffic, and for timing without communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collectives import Group
from shoal.comm.lane import Lane, Ticket
from shoal.comm.transport import NoSharedMemory, sent_bytes
from shoal.comm.wire import FIRST, packed
from shoal.comm.world import World


class Silent(NoSharedMemory):
    """The `transport.Transport` of `rank` among `size` ranks that do not exist: operations do nothing."""

    carrier = "nothing"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def _nothing(self, *_: Any) -> None:
        pass

    all_reduce = reduce_scatter = all_gather = all_to_all = broadcast = scatter = gather = _nothing
    send = recv = exchange = barrier = close = _nothing


class OfOneHost(Silent):
    """As if all ranks were on one host: they share memory."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return torch.zeros(numel, dtype=dtype) if self.size > 1 else None

    allocate_common = allocate


class SilentGroup(Group):
    """A group whose other ranks give the objects that this one gives, and take as long to say so."""

    def all_gather_object(self, value: Any) -> list[Any]:
        self._book("all_gather", value, self.size, 0)
        return [value] * self.size

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        self._book("broadcast", value, 1, src)
        return value

    def _book(self, operation: str, value: Any, times: int, src: int) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            rest = packed(value).numel() - FIRST
        for nbytes in (FIRST, rest) if rest else (FIRST,):
            payload = times * nbytes
            wire = sent_bytes(operation, payload, self.size, self.rank, src)
            self.ledger.count(self.name, operation, "object", payload, wire)


class SilentWorld(World):
    """The world of `rank` among `size` ranks that do not exist. Books what would be sent.

    Its lanes run work at once, in the caller's thread, since fake tensors belong to one thread. `one_host`: ranks share
    memory, as those of one host do.
    """

    def __init__(self, rank: int, size: int, one_host: bool = False) -> None:
        super().__init__(device="cpu")
        self.rank, self.size, self._carrier = rank, size, OfOneHost if one_host else Silent

    def group(self, name: str, ranks: list[int]) -> Group:
        return SilentGroup(name, ranks, self.ledger, {"cpu": self._carrier(ranks.index(self.rank), len(ranks))})

    def lane(self) -> Lane:
        return AtOnce(self.device, self.ledger)


class AtOnce(Lane):
    """A lane that runs what it is given at once, in the caller's thread."""

    def another(self) -> Lane:
        return AtOnce(self._device, self.ledger)

    def submit(self, work: Callable[[], None], name: str = "") -> Ticket:
        work()
        ticket = Ticket(self)
        ticket.done = True
        return ticket
