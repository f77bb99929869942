"""Batches of samples of similar cost: a counterpart of `Cursor`, and samplers for torch's DataLoader.

Ranks wait for the slowest one. Where samples differ in cost (length, size of a graph), a random batch gives ranks
unequal work. Here the dataset is sorted by cost, cut into global batches, the batches are shuffled, and each batch is
ordered so that equal contiguous parts for the ranks cost about the same. After Bagua's LoadBalancingDistributedSampler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from ..errors import UserError
from .cursor import GlobalBatches, permute
from .keyed import derive_key, keyed_hash
from .loader import MapDataset

Cost = Callable[[Any], float] | Sequence[float] | NDArray


def sample_costs(dataset: MapDataset, cost: Cost) -> NDArray[np.float64]:
    """Returns the cost of each sample: the numbers `cost`, or `cost(dataset[i])`, which reads the dataset once."""
    values = [cost(dataset[i]) for i in range(len(dataset))] if callable(cost) else cost
    costs = np.asarray(values, dtype=np.float64)
    if costs.shape != (len(dataset),):
        raise UserError(f"cost has shape {costs.shape} for {len(dataset)} samples: give one number a sample")
    return costs


@dataclass(frozen=True, eq=False)
class BalancedCursor(GlobalBatches):
    """The order of a dataset by cost, in global batches; same contract as `Cursor`.

    costs: one finite number for each sample.
    global_batch: samples in a step.
    seed: of the order.
    random_level: mixes the sorted order, 0 to 1: at 0 a batch has neighbours, and (equal costs aside) the same samples
        in every epoch; at 1 any samples.

    Every sample comes once per epoch, in an order that is a pure function of (costs, seed, epoch), not of the number of
    ranks; the last batch of an epoch may be short. An epoch is sorted at its first step and kept until the next epoch,
    so a step costs O(global_batch log global_batch). Raises UserError for invalid arguments.
    """

    costs: NDArray[np.float64]
    global_batch: int
    seed: int
    random_level: float = 0.0
    samples: int = field(init=False, repr=False)
    _ranks: NDArray[np.float64] = field(init=False, repr=False)
    _sorted: dict[int, NDArray[np.int64]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        costs = np.array(self.costs, dtype=np.float64)
        if costs.ndim != 1 or not costs.size:
            raise UserError(f"costs has shape {costs.shape}: give one number a sample, of at least one sample")
        if not np.isfinite(costs).all():
            first = int(np.flatnonzero(~np.isfinite(costs))[0])
            raise UserError(f"the cost of sample {first} is {costs[first]}: costs must be finite")
        if self.global_batch < 1:
            raise UserError(f"global_batch is {self.global_batch}: give the number of samples in one step, at least 1")
        if not 0 <= self.random_level <= 1:
            raise UserError(f"random_level is {self.random_level}: give a number from 0 (sorted by cost) to 1 (random)")
        object.__setattr__(self, "costs", costs)
        object.__setattr__(self, "samples", len(costs))
        object.__setattr__(self, "_ranks", np.searchsorted(np.sort(costs), costs) / len(costs))

    @property
    def kind(self) -> str:
        return f"{type(self).__name__} at level {self.random_level} of costs {crc32(self.costs.tobytes()):08x}"

    def ids(self, step: int) -> NDArray[np.int64]:
        """Returns the sample ids of the global batch of `step`, in order: int64 [global_batch] or fewer."""
        epoch, step_in_epoch = self.place(step)
        full, rest = divmod(self.samples, self.global_batch)
        # The short batch is anywhere in the sorted order, so that it is not always the most expensive one.
        short_at = derive_key("balanced short batch", self.seed, epoch) % (full + 1)
        if step_in_epoch < full:
            batch = int(permute(np.array([step_in_epoch], np.uint64), full, ("balanced", self.seed, epoch))[0])
            first = batch * self.global_batch + (rest if batch >= short_at else 0)
            chosen = self._order(epoch)[first : first + self.global_batch]
        else:
            first = short_at * self.global_batch
            chosen = self._order(epoch)[first : first + rest]
        return chosen[balanced_order(self.costs[chosen])]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """Returns all samples by rank of cost, mixed with keyed noise: a rank moves by at most the share
        random_level / (1 - random_level) of all samples."""
        if epoch not in self._sorted:
            key = derive_key("balanced noise", self.seed, epoch)
            noise = keyed_hash(np.arange(self.samples, dtype=np.uint64), key) / 2.0**64
            position = (1 - self.random_level) * self._ranks + self.random_level * noise
            self._sorted.clear()
            self._sorted[epoch] = np.lexsort((noise, position))  # equal costs in random order
        return self._sorted[epoch]


def balanced_order(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns an order in which equal contiguous parts have nearly equal sums of `costs`, for any number of parts.

    Blocks are paired, the cheapest with the most expensive, and the pairs are the blocks of the next round; the middle
    one of an odd number goes to the end. Pairing never widens the spread: the sums of all aligned blocks of 2^k samples
    differ by at most max(costs) - min(costs). Example: costs 1 2 3 4 5 6 give the blocks 1+6 2+5 3+4, then 1 6 3 4 and,
    at the end, 2 5.
    """
    blocks = np.arange(len(costs), dtype=np.int64).reshape(-1, 1)
    tail: list[NDArray[np.int64]] = []
    while len(blocks) > 1:
        blocks = blocks[np.argsort(costs[blocks].sum(axis=1), kind="stable")]
        half, odd = divmod(len(blocks), 2)
        if odd:
            tail.append(blocks[half])
            blocks = np.delete(blocks, half, axis=0)
        blocks = np.concatenate([blocks[:half], blocks[: half - 1 : -1]], axis=1)
    return np.concatenate([blocks.reshape(-1), *reversed(tail)])


class LoadBalancedSampler(Sampler[int]):
    """Samples a dataset for one of several replicas, so that at each position all replicas have samples of similar
    cost.

    For any torch DataLoader; call `set_epoch` before each epoch, as with torch's DistributedSampler. All replicas have
    the same number of samples: where `replicas` does not divide them, some are repeated.

    cost, random_level, seed: as in `sample_costs` and `BalancedCursor`.
    replicas, rank: the number of replicas, and the one to sample for.
    """

    def __init__(
        self, dataset: MapDataset, cost: Cost, replicas: int, rank: int, random_level: float = 0.0, seed: int = 0
    ) -> None:
        if not 0 <= rank < replicas:
            raise UserError(f"rank is {rank} of {replicas} replicas: ranks run from 0 to {replicas - 1}")
        self.replicas, self.rank, self.epoch = replicas, rank, 0
        self._cursor = BalancedCursor(sample_costs(dataset, cost), replicas, seed, random_level)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self._cursor.steps_per_epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.of_rank(self.rank))

    def of_rank(self, rank: int) -> list[int]:
        """Returns the samples of `rank` in this epoch; the order of cost among the ranks rotates with the position."""
        first = self.epoch * len(self)
        groups = (self._cursor.ids(step) for step in range(first, first + len(self)))
        return [int(ids[(rank + position) % self.replicas % len(ids)]) for position, ids in enumerate(groups)]


class LoadBalancedBatchSampler(Sampler[list[int]]):
    """Batches of any size over a LoadBalancedSampler.

    batch_fn: a pure function that cuts the ids of a replica into batches, e.g. by a budget of tokens.

    All replicas have as many batches as the one with most; the others repeat their first ones.
    """

    def __init__(self, sampler: LoadBalancedSampler, batch_fn: Callable[[list[int]], list[list[int]]]) -> None:
        self._sampler, self._batch_fn = sampler, batch_fn

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return max(len(batches) for batches in self._all())

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._all()
        mine = batches[self._sampler.rank]
        return (mine[number % len(mine)] for number in range(max(map(len, batches))))

    def _all(self) -> list[list[list[int]]]:
        batches = [self._batch_fn(self._sampler.of_rank(rank)) for rank in range(self._sampler.replicas)]
        for rank, mine in enumerate(batches):
            if not mine:
                raise UserError(
                    f"batch_fn gave no batch for rank {rank}: it must put every sample that it is given into one"
                )
        return batches
