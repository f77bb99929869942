"""A transport that carries nothing: for dry runs that count traffic, and for timing without communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.comm.collectives import Group
from shoal.comm.lane import Lane, Ticket
from shoal.comm.transport import NoSharedMemory
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


class SilentWorld(World):
    """The world of `rank` among `size` ranks that do not exist. Books what would be sent.

    Its lanes run work at once, in the caller's thread, since fake tensors belong to one thread.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(device="cpu")
        self.rank, self.size = rank, size

    def group(self, name: str, ranks: list[int]) -> Group:
        return Group(name, ranks, self.ledger, {"cpu": Silent(ranks.index(self.rank), len(ranks))})

    def lane(self) -> Lane:
        return _AtOnce(self.device, self.ledger)


class _AtOnce(Lane):
    def submit(self, work: Callable[[], None], name: str = "") -> Ticket:
        work()
        ticket = Ticket(self)
        ticket.done = True
        return ticket
