"""The protocol of a data-parallel algorithm: blocking code at a few places of the step, for any transport.

    begin(step)                  before the forward
    reduce(chunk, own_mean)      on the lane, chunk by chunk in order, during the last backward, where a sum is held
    exchanged(step, to_mean)     after backward and ballot, when the lane is empty
    update(step, ...)            the local update
    renew(to_mean, ...)          after an update that was made
    end(step)                    after it

`holds(step)` says what the gradient chunks then hold, and so who clips and votes: the group together or each replica
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Literal

import torch
from torch import Tensor

from shoal.chunks import Chunk, GradientPool
from shoal.comm import Group, Lane
from shoal.exchange.sends import Sends
from shoal.optim.optimizer import ChunkOptimizer

USUAL_CHUNK = 25 * 2**20
"""Default bytes of gradient in a chunk: the size of torch DDP's buckets."""


class Holds(Enum):
    """What the gradient chunks hold at the update."""

    SUM = "the sum over the samples of the whole group: one mean, one norm, one clipping, one vote"
    LOCAL_SUM = "the sum over this replica's samples, to be divided by the group's count: clipped and voted on alone"
    INDEPENDENT = "the sum over this replica's samples, to be divided by its own count: nothing of the step is shared"
    MEAN = "a finished mean, the same on every replica"
    LATE = "a finished mean of an earlier step: whether it is applied does not depend on what this step counts"
    LOCAL_MEAN = "the finished mean over this replica's samples: clipped alone, voted on together"
    NOTHING = "no gradient yet: the step updates nothing"


@dataclass(frozen=True)
class Replica:
    """One replica's trainable chunks and its connections, which an algorithm works on.

    - `chunks`: trainable chunks
    - `group`: the replicas; serves `reduce`, one operation after the other, on the lane
    - `lane`: runs work in order beside the computation
    - `optimizer`: updates the masters of the chunks
    - `among`: makes a group of some of the replicas, by name and ranks in `group`
    - `gradient_pool`: pool of whole gradients, where chunks borrow them
    - `beside`: ranks among whom the model is cut and which have different tokens: they sum the gradients of shared
      parameters
    - `deciding`: the same ranks, for decisions that depend on the values of the whole model
    """

    chunks: Sequence[Chunk]
    group: Group
    lane: Lane
    optimizer: ChunkOptimizer
    among: Callable[[str, Sequence[int]], Group]
    gradient_pool: GradientPool | None = None
    beside: Group | None = None
    deciding: Group | None = None

    def background(self, name: str) -> Group:
        """Makes another group of the same ranks, for work that goes on while the step runs. All ranks call it alike."""
        return self.among(name, range(self.group.size))


@dataclass(frozen=True)
class State:
    """Tensors of an algorithm by parameter name, each of its parameter's shape or its own.

    `on_resize`: what a replica starts with when their number changes: an equal part of their sum ("split", for error
    feedback), or the mean.
    """

    tensors: Mapping[str, Tensor]
    on_resize: Literal["split", "mean"]


@dataclass(kw_only=True)
class Algorithm:
    """A way for replicas to agree. Parameters are the dataclass fields of each algorithm; `attach` makes its state.

    `chunk_bytes`: gradient bytes at which a chunk is closed. None, for algorithms whose mathematics does not depend on
    the cut, takes what the measured links ask for, in the order in which gradients arrive. Where the cut matters
    (blocks of a codec, entries chosen of a chunk) it is a number.
    """

    chunk_bytes: int | None = None
    reduces_in_place: ClassVar[bool] = False
    """Whether `reduce` all-reduces the gradient chunks themselves, which then lie in shared memory if possible."""
    of_whole_models: ClassVar[str | None] = None
    """The reason why results differ for a model that is cut among ranks (plan.tp); None if they do not."""
    of_whole_rows: ClassVar[str | None] = None
    """The reason why it does not go with ranks that share rows of tokens (plan.cp); None if it does."""
    replica: Replica = field(init=False, repr=False, compare=False)

    def attach(self, replica: Replica) -> None:
        """Makes the state. Every replica calls it, with equal weights, before the first step.

        If the chunks are cut anew it is called once more, after `close`: weights are as they are, and the tensors of
        `state` are put back afterwards.
        """
        self.replica = replica

    @property
    def trains_apart(self) -> bool:
        """Whether there are steps after which the weights of replicas differ."""
        return type(self).drifts is not Algorithm.drifts

    @property
    def own_optimizers(self) -> bool:
        """Whether each replica's optimizer uses its own gradients: then states differ though the weights do not."""
        return False

    @property
    def updates_itself(self) -> bool:
        """Whether it makes the update itself, of every parameter on every replica."""
        return type(self).update is not Algorithm.update

    @property
    def holds_otherwise(self) -> bool:
        """Whether there are steps after whose exchange chunks do not hold the sum of all gradients."""
        return type(self).holds is not Algorithm.holds

    def suits(self, make: Callable[[], torch.optim.Optimizer]) -> None:
        """Decides, before `attach`, what depends on the kind of the optimizer; `make` makes a small one."""

    def check_ranks(self, ranks: int) -> None:
        """Raises UserError where so many replicas cannot agree in this way."""

    @property
    def partners(self) -> Group:
        """The ranks that update together: they count, clip and vote as one, unless replicas train alone."""
        return self.replica.group

    def partners_of(self, chunk: Chunk) -> Group:
        """Returns those partners that have `chunk`."""
        return self.partners

    def sends(self, ranks: int, itemsize: int, side: float) -> Sends:
        """Returns what each of `ranks` replicas sends in a step, for the planner. `itemsize`: bytes of an element of
        the gradients; `side`: of the model's matrices, in elements, where they were squares."""
        return Sends(in_parts=True)

    def holds(self, step: int) -> Holds:
        """Returns what the gradient chunks hold at the update of `step`; the same on every replica."""
        return Holds.SUM

    def drifts(self, step: int) -> bool:
        """Returns whether replicas may differ before `step`: then save, evaluate and export use their mean."""
        return False

    def begin(self, step: int) -> None:
        """Runs before the forward."""

    def reduce(self, chunk: Chunk, own_mean: Tensor) -> None:
        """Reduces the gradient of a chunk over the group; by default an exact all-reduce.

        Runs on the lane, in steps that hold SUM, MEAN or LOCAL_MEAN. `chunk.grad` is a sum over this replica's samples;
        times `own_mean` it is their mean. Of a chunk that is cut, only the owned stretch need hold the result: that
        takes half the bytes.
        """
        purpose = f"gradients {chunk.index}"
        if chunk.is_cut:
            chunk.reduce_scatter(purpose)
            chunk.add_copies(chunk.owned.gradient, purpose)
        else:
            self.partners.all_reduce(chunk.gradient, purpose=purpose)

    def reduce_part(self, chunk: Chunk, own_mean: Tensor) -> None:
        """Reduces what one of a step's backwards has added to the gradient of a chunk that is cut, as `reduce` does, of
        which the owned stretches are added up. What may be done to their sum at once is left to `reduce_sum`."""
        self.reduce(chunk, own_mean)

    def reduce_sum(self, chunk: Chunk, own: Tensor) -> None:
        """Ends the reduction of a chunk by parts, given `own`, the sum of its owned stretches. Runs on the lane."""

    def exchanged(self, step: int, to_mean: Tensor) -> None:
        """Runs after backward and ballot; all that the lane had has been waited for.

        `to_mean` (0-dim) turns the sum into the mean: of the group under SUM and LOCAL_SUM, of the replica under
        INDEPENDENT.
        """

    def skips_on_device(self, step: int) -> bool:
        """Returns whether `update` honours `skip` without making the host wait."""
        return self.replica.optimizer.skips_on_device

    def update(self, step: int, factor: Tensor, skip: Tensor | None, untouched: Sequence[str]) -> None:
        """Updates the masters with the gradient chunks times `factor` (mean and clipping in one).

        - `factor`: 0-dim
        - `skip`: 0-dim; not zero where the update is to be left out; None if the host has decided
        - `untouched`: parameters that no gradient of this step has reached
        """
        self.replica.optimizer.apply(factor, skip, untouched)

    def due(self, step: int, untouched: Sequence[str]) -> Sequence[str]:
        """Returns the parameters that the gradients of the update did not touch; `untouched`: those of this step."""
        return untouched

    @property
    def keeps_back(self) -> bool:
        """Whether it adds what it kept back of earlier steps to a step's gradients.

        Sums then come divided by the expected count, which is nearest to the unit of the mean.
        """
        return False

    def renew(self, to_mean: Tensor, skip: Tensor | None, untouched: Sequence[str]) -> None:
        """Renews what is kept back for later steps, after an update with the gradient chunks times `to_mean` (0-dim).

        Clipping is not part of `to_mean`. `skip`, `untouched`: as in `update`.
        """

    def counted(self, count: Tensor) -> None:
        """Gets, after an update of this replica, what its samples counted (0-dim)."""

    def end(self, step: int) -> None:
        """Runs after the update, or after a step without one."""

    def settle(self) -> None:
        """Waits for background work, before replicas are compared, averaged or saved. All replicas call it alike."""

    def close(self) -> None:
        """Ends background work for good, without the other replicas."""

    def state(self) -> dict[str, State]:
        """Returns what a resumed run needs beside weights and optimizer, by name."""
        return {}

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Runs after weights and optimizer were read from a checkpoint, and before the tensors of `state` are, as far
        as it has them: makes these what they are where the weights that were read are the first ones."""
        for state in self.state().values():
            for tensor in state.tensors.values():
                tensor.zero_()

    def restored(self) -> None:
        """Runs after weights, optimizer and the tensors of `state` were read from a checkpoint, in place."""


@dataclass(kw_only=True)
class TrainsAlone(Algorithm):
    """An algorithm of weights: from step `alone_from` on replicas train alone; before it they sum gradients exactly."""

    @property
    def alone_from(self) -> int:
        return 0

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        # counts of this replica's updates since its mean with the others was last taken
        self._counts = torch.zeros(1, dtype=torch.float64, device=replica.chunks[0].master.device)

    def counted(self, count: Tensor) -> None:
        self._counts += count

    def holds(self, step: int) -> Holds:
        return Holds.SUM if step < self.alone_from else Holds.INDEPENDENT

    def drifts(self, step: int) -> bool:
        return step > self.alone_from


def part_of_mean(counts: Tensor, group: Group) -> float | None:
    """Returns this replica's weight in a mean of all, by `counts` (one element); None where all counts are equal.

    So each replica weighs what its samples would weigh in one step of all of them.
    """
    everyone = group.all_gather(counts.new_empty(group.size), counts, purpose="counts").tolist()
    return None if len(set(everyone)) == 1 else everyone[group.rank] / sum(everyone)


def by_parameter(chunks: Sequence[Chunk], flats: Sequence[Tensor]) -> dict[str, Tensor]:
    """Returns views of one flat tensor a chunk, each laid out as its chunk, by parameter name."""
    return {slot.name: slot.view(flat) for chunk, flat in zip(chunks, flats, strict=True) for slot in chunk.slots}
