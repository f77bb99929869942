"""The forward of one microbatch, wherever one is run: in a step, an evaluation, an objective, a loop of the caller's, a
dry run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal.chunks import Gather
from shoal.comm.ledger import Ledger
from shoal.data import Batch
from shoal.device import keep_generators, to_device
from shoal.errors import UserError
from shoal.exchange.rows import ByRows, as_rows
from shoal.module.attributes import attributes_put_back
from shoal.module.compiling import as_written, branching
from shoal.module.random import Randomness, host_draws, keyed_functional
from shoal.parallel.axis import Axis
from shoal.training.effects import Effects
from shoal.training.intact import Intact
from shoal.training.loss import Loss, Sums, sums_of
from shoal.training.resident import Resident

BY_FUNCTIONS = (
    "the forward takes derivatives by torch.func (grad, vjp, jacrev, hessian), of which torch has none where it is "
    "seen what backward keeps, as under plan.memory and plan.zero = 3: take a plan without them, or "
    "torch.autograd.grad in the forward"
)
"""What is said where torch.func meets hooks on saved tensors."""


@dataclass(frozen=True)
class Forward:
    """A module, its loss, and what surrounds them.

    - `randomness`: what is drawn, and with it the device
    - `effects`: what forwards in training mode change
    - `axes`: those along which there are several ranks, who may share a microbatch
    - `embeddings`: those whose gradients are added up by rows
    - `gather`: brings weights that are whole only while they are used; `intact`: sees that forwards write to none
    """

    module: nn.Module
    loss: Loss
    randomness: Randomness
    ledger: Ledger
    effects: Effects
    axes: Sequence[Axis] = ()
    embeddings: Sequence[ByRows] = ()
    gather: Gather | Resident = field(default_factory=Resident)
    intact: Intact = field(default_factory=Intact)

    @property
    def is_keyed(self) -> bool:
        """Whether functional calls are stood in for, to draw by key or to attend to other ranks' tokens."""
        return self.randomness.keyed or self.randomness.attend is not None

    @property
    def streams(self) -> int:
        """The number of ranks that share each row."""
        return math.prod(axis.streams for axis in self.axes)

    def set_training(self) -> None:
        """Puts the module in training mode. Where all of it is, `train` would set every flag again: 1 ms a step of a
        hundred modules."""
        if not all(each.training for each in self.module.modules()):
            self.module.train()

    def switch(self, train: bool) -> None:
        """Puts the module in training or evaluation mode. Raises UserError where that writes to weights, and goes
        wrong."""
        with self.intact.aside(always=False), self.gather.between():
            self.module.train(train)

    def load(self, batch: Batch, ids: Sequence[int]) -> dict[str, Tensor]:
        """Loads the samples `ids` onto the device; none of them as a batch of zero samples."""
        if not ids:
            return {key: value[:0].to(self.randomness.device) for key, value in batch.load(batch.ids[:1]).items()}
        return self.place(batch.load(ids))

    def place(self, loaded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Puts loaded samples on the device: this rank's tokens of each row."""
        microbatch = {key: to_device(value, self.randomness.device) for key, value in loaded.items()}
        for axis in self.axes:
            microbatch = axis.take(microbatch)
        return microbatch

    @contextmanager
    def rows(self) -> Iterator[None]:
        """Wraps microbatches: after them a forward is of whole rows again."""
        try:
            yield
        finally:
            for axis in self.axes:
                axis.end()

    @contextmanager
    def keyed(self, seeded: bool = True) -> Iterator[None]:
        """Wraps forward and backward: what is drawn there is keyed, if it is to be.

        `seeded`: whether numpy's and Python's draws are those of the microbatch that the randomness has begun; else
        they are the caller's.
        """
        host = host_draws(self.randomness.first) if seeded else nullcontext()
        with branching(), host, keyed_functional(self.randomness) if self.is_keyed else nullcontext():
            yield

    @contextmanager
    def running(self, batch: Batch, index: int, number: int, microbatch: Mapping[str, Tensor]) -> Iterator[None]:
        """Wraps what is computed of the microbatch at `index` of `number`; errors say which one it was."""
        try:
            with self.keyed():
                yield
        except Exception as error:
            if "saved tensor hooks" in str(error):
                raise UserError(BY_FUNCTIONS) from error
            shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in microbatch.items())
            error.add_note(f"after {batch.step} steps, in microbatch {index + 1} of {number} on this rank: {shapes}")
            if self.embeddings and "sparse" in str(error).lower():
                error.add_note(
                    "gradients of embeddings come by rows here, as torch.sparse tensors, also from torch.autograd.grad "
                    "inside a loss: take .to_dense() of them"
                )
            raise

    def sums(self, microbatch: Mapping[str, Tensor]) -> Sums:
        """Runs the loss on a microbatch that was placed."""
        return sums_of(self.loss, self.module, microbatch, self.axes)

    def try_out(self, batch: Batch, ids: Sequence[int]) -> None:
        """Shows axes whose ranks share rows, before the first step, forwards of the samples `ids`, of which nothing is
        left.

        Not where routers see all tokens of a microbatch, and what becomes of one may depend on the others.
        """
        sharing = [axis for axis in self.axes if axis.shares_tokens]
        if not sharing or self.effects.routes_all_tokens:
            return

        def run(microbatch: Mapping[str, Tensor]) -> Sums:
            self.randomness.begin(batch.step, ids)
            with self.keyed(), self.effects.of(False), attributes_put_back(self.module):  # each finds the same
                return self.sums(microbatch)

        with ExitStack() as stack:
            for each in (torch.no_grad(), keep_generators([self.randomness.device]), as_written(), self.rows()):
                stack.enter_context(each)
            stack.enter_context(self.intact.aside())
            stack.enter_context(self.gather.step("try out"))
            microbatch = self.load(batch, ids)
            for axis in sharing:
                axis.try_out(run, microbatch)

    def train(self, microbatch: Mapping[str, Tensor]) -> Sums:
        """Runs the loss for a backward to come, and sees what becomes of the module's buffers."""
        span, buffers = self.ledger.span("compute", "forward"), self.effects.buffers
        with span, as_rows(self.embeddings), self.intact.forward(), buffers.watching() as gave:
            sums = self.sums(microbatch)
            gave((sums.total, sums.count, sums.aux))
        for axis in self.axes:
            axis.check_auxiliary(sums.aux, self.effects.routes_all_tokens)
        return sums
