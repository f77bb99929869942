"""What a data-parallel algorithm is: plain blocking code at a few places of the step, the same file for every transport.

    begin(step)                  before the forward
    reduce(chunk, own_mean)      on the lane, chunk by chunk in order, while the last backward goes on, where a sum is held
    exchanged(step, to_mean)     after backward and ballot
    update(step, ...)            the local update
    renew(to_mean, ...)          after an update that was made
    end(step)                    after it

What the gradient chunks hold then, `holds(step)` says, and with it who clips and votes: the group together or each replica alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Literal

import torch
from torch import Tensor

from shoal.chunks import Chunk, Lender
from shoal.comm import Group, Lane
from shoal.optim.optimizer import ChunkOptimizer

USUAL_CHUNK = 25 * 2**20
"""Bytes of gradient where nothing speaks for another size: torch DDP's bucket."""


class Holds(Enum):
    """What the gradient chunks hold when the update comes."""

    SUM = "the sum over the samples of the whole group: one mean, one norm, one clipping, one vote"
    OWN = "the sum over this replica's samples, weighted by the group's count: clipped and voted on alone"
    ALONE = "the same, weighted by this replica's own count: nothing of the step is shared"
    MEAN = "a finished mean, the same on every replica"
    LATE = "the same, of an earlier step: whether that is applied does not depend on what this step counts"
    OWN_MEAN = "the finished mean over this replica's samples: clipped alone, voted on together"
    NOTHING = "no gradient yet: the step updates nothing"


@dataclass(frozen=True)
class Replica:
    """What an algorithm works on: one replica's trainable chunks and its place among the others.

    `group` serves `reduce`, one operation after the other on the lane. `background(name)` is another group of the same ranks for work
    that goes on while the step runs; all ranks must ask for it alike. `among(name, places)` is a group of some of them. `lender`: of whole
    gradients, where chunks borrow them. `beside`: the ranks among whom a model is cut, where each has its tokens alone: they sum the gradients of what all of
    them have. `deciding`: the same ranks, for what an algorithm decides by the values of all of a model.
    """

    chunks: Sequence[Chunk]
    group: Group
    lane: Lane
    optimizer: ChunkOptimizer
    among: Callable[[str, Sequence[int]], Group]
    lender: Lender | None = None
    beside: Group | None = None
    deciding: Group | None = None

    def background(self, name: str) -> Group:
        return self.among(name, range(self.group.size))


@dataclass(frozen=True)
class State:
    """Tensors of an algorithm by parameter name, each of its parameter's shape or its own. When the number of replicas changes, a replica
    starts with an equal part of their sum ("split", for error feedback), with the whole sum, or with their mean."""

    tensors: Mapping[str, Tensor]
    on_resize: Literal["split", "whole", "mean"]


@dataclass(kw_only=True)
class Algorithm:
    """How replicas agree. Parameters are the dataclass fields of each algorithm; `attach` makes its state.

    `chunk_bytes` is the gradient size at which a chunk is closed. None: what the measured links ask for, in the order in which gradients
    come, since the cut changes nothing of what the algorithm computes. Where it does (blocks of a codec, entries chosen of a chunk) it is a number.
    """

    chunk_bytes: int | None = None
    reduces_in_place: ClassVar[bool] = False
    """Whether `reduce` all-reduces the gradient chunks themselves, which then lie in memory that the group shares, where there is such."""
    of_whole_models: ClassVar[str | None] = None
    """Why it does not do the same for a model that is cut among ranks (plan.tp); None: it does."""
    of_whole_rows: ClassVar[str | None] = None
    """Why it does not go with ranks that share rows of tokens (plan.cp); None: it does."""
    replica: Replica = field(init=False, repr=False, compare=False)

    def attach(self, replica: Replica) -> None:
        """Called by every replica, with equal weights, before the first step; and once more, after it and `close`, if the chunks are cut anew:
        then with weights as they are, and the tensors of `state` are put back afterwards."""
        self.replica = replica

    @property
    def trains_apart(self) -> bool:
        """Whether there are steps after which the weights of replicas differ."""
        return type(self).drifts is not Algorithm.drifts

    @property
    def own_optimizers(self) -> bool:
        """Whether each replica's optimizer goes by the gradients of that replica, so that their states differ though the weights do not."""
        return False

    def suits(self, make: Callable[[], torch.optim.Optimizer]) -> None:
        """Before it is attached: decides what is left open by the kind of the optimizer, a small one of which `make` makes."""

    @property
    def partners(self) -> Group:
        """The ranks that update together: they count, clip and vote as one, unless replicas train alone."""
        return self.replica.group

    def partners_of(self, chunk: Chunk) -> Group:
        """Those of them who have `chunk`."""
        return self.partners

    def holds(self, step: int) -> Holds:
        """What the gradient chunks hold at the update of `step`; the same on every replica."""
        return Holds.SUM

    def drifts(self, step: int) -> bool:
        """Whether replicas may differ before `step`: then save, evaluate and export use their mean."""
        return False

    def begin(self, step: int) -> None:
        """Before the forward."""

    def reduce(self, chunk: Chunk, own_mean: Tensor) -> None:
        """On the lane, in steps that hold SUM, MEAN or OWN_MEAN: `chunk.grad`, a sum over this replica's samples (times `own_mean` their mean),
        becomes that of the group; unless an algorithm knows better by an exact all-reduce. Of a chunk that is cut only the owned stretch need
        hold it: that is half the bytes."""
        purpose = f"gradients {chunk.index}"
        if chunk.is_cut:
            chunk.reduce_scatter(purpose)
        else:
            self.partners.all_reduce(chunk.gradient, purpose=purpose)

    def exchanged(self, step: int, to_mean: Tensor) -> None:
        """After backward and ballot. Under SUM and OWN `to_mean` turns the group's sum into its mean, under ALONE the own sum."""

    def skips_on_device(self, step: int) -> bool:
        """Whether `update` honours `skip` without a wait of the host."""
        return self.replica.optimizer.skips_on_device

    def update(self, step: int, factor: Tensor, skip: Tensor | None, untouched: Sequence[str]) -> None:
        """Updates the masters with the gradient chunks times `factor` (mean and clipping in one)."""
        self.replica.optimizer.apply(factor, skip, untouched)

    def due(self, step: int, untouched: Sequence[str]) -> Sequence[str]:
        """Which parameters the gradients of the update have not touched; `untouched`: those of this step have not."""
        return untouched

    @property
    def keeps_back(self) -> bool:
        """Whether it adds to a step's gradients what it has kept back of those before: then sums come divided by the count as it is expected, which is nearest to the unit of the mean."""
        return False

    def renew(self, to_mean: Tensor, skip: Tensor | None, untouched: Sequence[str]) -> None:
        """After an update with the gradient chunks times `to_mean` (0-dim), clipping apart: what is kept back for later steps is renewed. `skip`, `untouched`: as in `update`."""

    def counted(self, count: Tensor) -> None:
        """After an update of this replica: what its samples counted (0-dim)."""

    def end(self, step: int) -> None:
        """After the update, or after a step without one."""

    def settle(self) -> None:
        """Ends background work for now: before replicas are compared, averaged, saved. All replicas call it alike."""

    def close(self) -> None:
        """Ends background work for good, without the others."""

    def state(self) -> dict[str, State]:
        """What a resumed run needs beside weights and optimizer, by name."""
        return {}

    def restored(self) -> None:
        """After weights, optimizer and the tensors of `state` were read from a checkpoint, in place."""


@dataclass(kw_only=True)
class TrainsAlone(Algorithm):
    """An algorithm of weights: from the step `alone_from` on replicas train alone; before it they sum gradients exactly and stay equal."""

    @property
    def alone_from(self) -> int:
        return 0

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        self._counts = torch.zeros(1, dtype=torch.float64, device=replica.chunks[0].master.device)
        """Of this replica's updates since its mean with the others was last taken."""

    def counted(self, count: Tensor) -> None:
        self._counts += count

    def holds(self, step: int) -> Holds:
        return Holds.SUM if step < self.alone_from else Holds.ALONE

    def drifts(self, step: int) -> bool:
        return step > self.alone_from


def part_of_mean(counts: Tensor, group: Group) -> float | None:
    """This replica's part of a mean in which each weighs by its `counts` (one element): as one step of all of them would weigh its samples. None where they are the same."""
    everyone = group.all_gather(counts.new_empty(group.size), counts, purpose="counts").tolist()
    return None if len(set(everyone)) == 1 else everyone[group.rank] / sum(everyone)


def by_parameter(chunks: Sequence[Chunk], flats: Sequence[Tensor]) -> dict[str, Tensor]:
    """Views of one flat tensor a chunk, each laid out as its chunk, by parameter name."""
    return {slot.name: slot.view(flat) for chunk, flat in zip(chunks, flats, strict=True) for slot in chunk.slots}
