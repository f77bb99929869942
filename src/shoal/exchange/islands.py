"""Islands: one algorithm among the ranks of each island, another one between the islands.

    plan.exchange = {name = "islands", ranks = 8, inside = "allreduce", across = {name = "diloco", every = 100}}

They are the process sets of a run: every rank updates together with its island, and meets the corresponding rank of the
other islands through the algorithm of weights, which sees an island as one replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from shoal.chunks import Chunk
from shoal.comm import Group
from shoal.errors import UserError
from shoal.exchange.algorithm import Algorithm, Holds, Replica, State
from shoal.exchange.composed import Composed
from shoal.exchange.sends import Sends
from shoal.plan import Option


@dataclass
class Islands(Composed):
    """Runs one algorithm inside islands and one across.

    - `make`: makes an algorithm of an option
    - `ranks`: number of consecutive ranks in an island
    - `inside`: an algorithm whose replicas stay equal
    - `across`: an algorithm whose replicas train alone
    """

    make: Callable[[Option], Algorithm] = field(repr=False)
    ranks: int = 2
    inside: Option = "allreduce"
    across: Option = "diloco"

    def __post_init__(self) -> None:
        self._inside, self._across = self.make(self.inside), self.make(self.across)
        self.first = self._inside
        fixed = (self.chunk_bytes, self._inside.chunk_bytes, self._across.chunk_bytes)
        self.of_whole_models = self._inside.of_whole_models or self._across.of_whole_models  # type: ignore[misc]
        self.of_whole_rows = self._inside.of_whole_rows or self._across.of_whole_rows  # type: ignore[misc]
        self.chunk_bytes = next((number for number in fixed if number is not None), None)
        if self._across.holds(0) is not Holds.INDEPENDENT or self._inside.drifts(1):
            raise UserError(
                f"plan.exchange: inside = {self.inside!r} must keep replicas equal, and across = {self.across!r} must "
                "let them train alone"
            )
        if self.ranks > 1 and (why := self._across.of_whole_models) is not None:
            raise UserError(
                f"plan.exchange: across = {self.across!r} with islands of {self.ranks} ranks: {why}. Take one that "
                'goes by steps, such as "local_sgd" or "diloco"'
            )

    def check_ranks(self, ranks: int) -> None:
        if self.ranks < 1 or ranks % self.ranks:
            fits = [each for each in range(1, ranks + 1) if ranks % each == 0]
            raise UserError(
                f"plan.exchange.ranks = {self.ranks}: islands of {self.ranks} ranks do not divide {ranks} "
                f"data-parallel ranks: take one of {fits}"
            )
        self._inside.check_ranks(self.ranks)
        self._across.check_ranks(ranks // self.ranks)

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        rank, size = replica.group.rank, replica.group.size
        island, index = divmod(rank, self.ranks)
        self._inside.attach(_within(replica, "island", range(island * self.ranks, (island + 1) * self.ranks)))
        self._across.attach(_within(replica, "islands", range(index, size, self.ranks)))
        self.parts = (self._inside, self._across)

    def sends(self, ranks: int, itemsize: int, side: float) -> Sends:
        share = passes = handed = 0.0
        for part, among in ((self._inside, min(self.ranks, ranks)), (self._across, ranks // self.ranks)):
            if among > 1:
                its = part.sends(among, itemsize, side)
                share += its.share * (1 - 1 / among) / (1 - 1 / ranks)
                passes += its.passes
                handed += its.share * its.handed
        return Sends(share, passes, handed=handed / share if share else 1.0)

    @property
    def partners(self) -> Group:
        return self._inside.partners

    @property
    def updates_itself(self) -> bool:
        return self._inside.updates_itself

    def drifts(self, step: int) -> bool:
        return self._across.drifts(step)

    def reduce(self, chunk: Chunk, own_mean: Tensor) -> None:
        self._inside.reduce(chunk, own_mean)

    def skips_on_device(self, step: int) -> bool:
        return self._inside.skips_on_device(step)

    def update(self, step: int, factor: Tensor, skip: Tensor | None, untouched: Sequence[str]) -> None:
        self._inside.update(step, factor, skip, untouched)

    def counted(self, count: Tensor) -> None:
        self._across.counted(count)

    def state(self) -> dict[str, State]:
        return {
            f"{where}-{name}": state
            for where, part in (("inside", self._inside), ("across", self._across))
            for name, state in part.state().items()
        }


def _within(replica: Replica, name: str, ranks: Sequence[int]) -> Replica:
    """Returns the replica with only `ranks` of its group."""
    ranks = list(ranks)
    return replace(
        replica,
        group=replica.among(name, ranks),
        among=lambda further, some: replica.among(f"{name}-{further}", [ranks[rank] for rank in some]),
    )
