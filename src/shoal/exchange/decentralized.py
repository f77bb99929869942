"""Decentralized SGD (https://arxiv.org/abs/1705.09056): replicas average weights with a few others.

x_i <- mean over i's partners of x - lr g_i(x_i), where the gradient is that of the weights before the average. The mean
over all replicas is what SGD with all gradients would give. "all" averages over all replicas; "shift_one" pairs each
rank with another one every time, so that within W - 1 rounds each meets each (the circle method of tournaments; with an
odd number one rank rests each round).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shoal.errors import UserError
from shoal.exchange.algorithm import Replica, TrainsAlone
from shoal.exchange.sends import Sends, to_peers


def partner(rank: int, size: int, round_: int) -> int:
    """Returns whom `rank` meets in a round; itself when it rests.

    Seats 0..n-2 turn round a table, the last seat stays.
    """
    seats = size + size % 2
    turns = seats - 1
    if rank == seats - 1:
        other = next(seat for seat in range(turns) if (2 * seat - round_) % turns == 0)
    else:
        other = (round_ - rank) % turns
        other = seats - 1 if other == rank else other
    return other if other < size else rank


@dataclass
class Decentralized(TrainsAlone):
    """Averages weights over `peers` ("all" or "shift_one") every `every` steps, during forward and backward."""

    peers: str = "shift_one"
    every: int = 1

    def sends(self, ranks: int, itemsize: int, side: float) -> Sends:
        handed = to_peers(ranks) if self.peers != "all" else 1.0
        return Sends(4 / handed / itemsize / self.every, handed=handed)  # fp32 weights

    def __post_init__(self) -> None:
        if self.peers not in ("all", "shift_one") or self.every < 1:
            raise UserError(
                f'plan.exchange: peers = "{self.peers}", every = {self.every}: peers are "all" or "shift_one", '
                "every at least 1 step"
            )

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        self._group = replica.background("decentralized")
        self._average = [torch.empty_like(chunk.master) for chunk in replica.chunks]

    def begin(self, step: int) -> None:
        if step % self.every == 0:
            for chunk, average in zip(self.replica.chunks, self._average, strict=True):
                self.replica.lane.submit(
                    partial(self._mix, step // self.every, chunk.master, average), f"weights {chunk.index}"
                )

    @torch.no_grad()
    def _mix(self, round_: int, x: Tensor, average: Tensor) -> None:
        if self.peers == "all":
            average.copy_(x)
            self._group.all_reduce(average, "avg", purpose="weights")
            return
        other = partner(self._group.rank, self._group.size, round_)
        if other == self._group.rank:
            average.copy_(x)
            return
        self._group.exchange(average, other, x, other, purpose="weights")
        # The lower rank's weights come first on both sides: the two get the same bits.
        first, second = (x, average) if self._group.rank < other else (average, x)
        torch.add(first, second, out=average).mul_(0.5)

    @torch.no_grad()
    def exchanged(self, step: int, to_mean: Tensor) -> None:
        if step % self.every == 0:
            for chunk, average in zip(self.replica.chunks, self._average, strict=True):
                chunk.master.copy_(average)

    @torch.no_grad()
    def end(self, step: int) -> None:
        for chunk in self.replica.chunks:
            chunk.publish()
