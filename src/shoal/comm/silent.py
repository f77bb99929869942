"""A transport that carries nothing: for dry runs that count traffic, and for timing without communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shoal.comm.collectives import Group
from shoal.comm.lane import Lane, Ticket
from shoal.comm.transport import NoSharedMemory
from shoal.comm.world import World


class Silent(NoSharedMemory):
    """The `transport.Transport` of `rank` among `size` ranks that do not exist: operations do nothing."""

    carrier = "nothing"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, flat: Tensor, op: str) -> None:
        pass

    def reduce_scatter(self, out: Tensor, flat: Tensor, op: str) -> None:
        pass

    def all_gather(self, out: Tensor, flat: Tensor) -> None:
        pass

    def all_to_all(self, out: Tensor, flat: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> None:
        pass

    def broadcast(self, flat: Tensor, src: int) -> None:
        pass

    def scatter(self, out: Tensor, flat: Tensor | None, src: int) -> None:
        pass

    def gather(self, out: Tensor | None, flat: Tensor, dst: int) -> None:
        pass

    def send(self, flat: Tensor, dst: int) -> None:
        pass

    def recv(self, flat: Tensor, src: int) -> None:
        pass

    def exchange(self, out: Tensor, source: int, flat: Tensor, target: int) -> None:
        pass

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


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
