"""Local SGD (https://arxiv.org/abs/1805.09767): replicas train alone and average their weights every H steps.

Post-local SGD (https://arxiv.org/abs/1808.07217) sums gradients at every step for the first `start` steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.errors import UserError
from shoal.exchange.algorithm import State, TrainsAlone, part_of_mean
from shoal.exchange.sends import Sends


@dataclass
class LocalSGD(TrainsAlone):
    """Averages weights after every `every`-th step, from step `start` on; before it replicas stay equal by all-reduce.

    Each replica weighs what its samples counted since the last average.
    """

    every: int = 8
    start: int = 0

    def sends(self, ranks: int, itemsize: int, side: float) -> Sends:
        return Sends(4 / itemsize / self.every)  # fp32 weights

    def __post_init__(self) -> None:
        if self.every < 1 or self.start < 0:
            raise UserError(f"plan.exchange: every = {self.every}, start = {self.start}: give at least 1 and 0 steps")

    @property
    def alone_from(self) -> int:
        return self.start

    @torch.no_grad()
    def end(self, step: int) -> None:
        if step < self.start or (step + 1 - self.start) % self.every:
            return
        group, part = self.replica.group, part_of_mean(self._counts, self.replica.group)
        self._counts.zero_()
        for chunk in self.replica.chunks:
            if part is not None:
                chunk.master.mul_(part)
            group.all_reduce(chunk.master, "avg" if part is None else "sum", purpose=f"weights {chunk.index}")
            chunk.publish()

    def counted(self, count: Tensor) -> None:
        if self._alone:
            super().counted(count)

    def begin(self, step: int) -> None:
        self._alone = step >= self.start

    def state(self) -> dict[str, State]:
        return {"counts": State({"all": self._counts}, "mean")}
