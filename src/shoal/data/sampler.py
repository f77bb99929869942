"""A rank's part of each global batch for a torch DataLoader, where the number of ranks may change after any step.

    sampler = ElasticSampler(Cursor(len(dataset), global_batch=256, seed=0), replicas, rank)
    loader = DataLoader(dataset, batch_sampler=sampler)
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            ...                     # a step on the mean loss of `batch`, times sampler.weight
            sampler.record()        # is done

An epoch's global batches do not depend on the number of ranks; each is dealt out in runs as even as can be. So no
sample is padded, repeated or dropped, and the place is a number of global batches, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from ..errors import UserError
from .balanced import BalancedCursor
from .cursor import Cursor, share_starts


class ElasticSampler(Sampler[list[int]]):
    """Batches of sample ids for one of several replicas, as `batch_sampler=` of a DataLoader: this replica's part of
    each global batch that is not recorded yet.

    order: of the samples, in global batches
    replicas, rank: the number of replicas, and the one to sample for; changed by `resize`
    shares: of each replica, relative to each other; by default all have as much
    epoch, step: the place: `step` global batches of `epoch` are recorded

    Parts may differ by a sample. A replica without a sample gets the first one of the global batch, which does not
    count: its `weight` is 0.
    """

    def __init__(
        self, order: Cursor | BalancedCursor, replicas: int = 1, rank: int = 0, shares: Sequence[float] = ()
    ) -> None:
        self.order, self.epoch, self.step = order, 0, 0
        self._changes = 0  # of the place or the replicas, by which iterations under way are out of date
        self.resize(replicas, rank, shares)

    def resize(self, replicas: int, rank: int, shares: Sequence[float] = ()) -> None:
        """Goes on with another number of replicas, or another rank. Iterate the loader again afterwards."""
        if not 0 <= rank < replicas:
            raise UserError(f"rank is {rank} of {replicas} replicas: ranks run from 0 to {replicas - 1}")
        if shares and (len(shares) != replicas or min(shares) < 0 or not any(shares)):
            raise UserError(f"shares are {list(shares)}: give a number for each of {replicas} replicas, not all 0")
        self.replicas, self.rank, self._shares = replicas, rank, tuple(shares) or (1,) * replicas
        self._changes += 1

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of `epoch`; within that epoch the place stays, so that a run goes on where it was."""
        if epoch != self.epoch:
            self._go_to(epoch, 0)

    def record(self, steps: int = 1) -> None:
        """Counts global batches as processed: they do not come again. All replicas call it alike, after each step."""
        if not 0 <= steps <= len(self):
            raise UserError(
                f"record({steps}): {len(self)} global batches of epoch {self.epoch} are left; set_epoch next"
            )
        self.step += steps

    @property
    def weight(self) -> float:
        """The factor of this replica's mean loss in the global batch under way (the one to be recorded next), by which
        the mean over replicas is that of the global batch: 1 where all have as many samples."""
        samples = self._batch(self.step)
        return len(self._part(samples)) * self.replicas / len(samples)

    def state_dict(self) -> dict[str, Any]:
        """Returns the place, and what it is a place in."""
        return {"epoch": self.epoch, "step": self.step, **self._about()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a saved place. Raises UserError where the order is another: samples would be repeated, or lost."""
        for name, now in self._about().items():
            if state.get(name, now) != now:
                raise UserError(
                    f"the sampler's {name} is {now}, and was {state[name]} where its place was saved: samples of the "
                    "epoch would be repeated or lost. Make it as it was, or call set_epoch instead of loading it"
                )
        self._go_to(state["epoch"], state["step"])

    def __len__(self) -> int:
        """The number of global batches that are left of the epoch."""
        return self.order.steps_per_epoch - self.step

    def __iter__(self) -> Iterator[list[int]]:
        begun = self._changes
        for step in range(self.step, self.order.steps_per_epoch):
            if self._changes != begun:
                raise UserError("the sampler's place or ranks have changed: iterate the loader again")
            samples = self._batch(step)
            mine = self._part(samples)
            yield (mine if len(mine) else samples[:1]).tolist()

    def _go_to(self, epoch: int, step: int) -> None:
        if (epoch, step) != (self.epoch, self.step):
            self.epoch, self.step = epoch, step
            self._changes += 1

    def _batch(self, step: int) -> NDArray[np.int64]:
        return self.order.ids(self.epoch * self.order.steps_per_epoch + step)

    def _part(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        first, last = share_starts(len(samples), self._shares)[self.rank : self.rank + 2]
        return samples[first:last]

    def _about(self) -> dict[str, Any]:
        order = self.order
        return {"samples": order.samples, "global_batch": order.global_batch, "seed": order.seed, "order": order.kind}
