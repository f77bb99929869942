"""A training loop that the caller owns, over the phases of a step: forwards and backwards come one by one, the update
when it is asked for.

    loop(...)           opens a step where none is open, and runs the module in it
    loop.backward(loss) one microbatch; gradients go out during the step's last one
    loop.step()         after the last one: reduce, ballot, clip, vote, apply

The loss of a microbatch is a mean, and a step's objective the mean of them over ranks and microbatches: (sum, count) =
(loss, 1).

    with loop.join():   around all of it, where some ranks have fewer microbatches than others
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shoal.comm import Group
from shoal.device import keep_generators
from shoal.errors import UserError
from shoal.training.loss import Sums
from shoal.training.result import StepResult
from shoal.training.step import StepRunner


def callers_loss(model: nn.Module, microbatch: Mapping[str, Tensor]) -> NoReturn:
    """Stands for the loss of an engine whose loop is the caller's, who computes it."""
    raise UserError(
        "this engine has no loss function, since its loop is the caller's: engine.step, evaluate and objective need one"
    )


class Loop:
    """Steps of `microbatches` forwards and backwards on each rank, all of which make them alike.

    - `step_index()`: the number of the step
    - `stepped()`: called after each
    - `partners`: the places in `group` of the ranks that update together
    - `joined()`: makes a group for `join`; None where ranks meet in their forwards

    A forward without gradients belongs to no step; where weights are gathered (plan.zero = 3 without shared memory), or
    tokens travel to experts (plan.ep), all ranks make those alike too. What the module draws is keyed by step, rank and
    forward; torch's generators are the caller's again afterwards.
    """

    def __init__(
        self,
        runner: StepRunner,
        group: Group,
        microbatches: int,
        step_index: Callable[[], int],
        stepped: Callable[[], None],
        partners: Sequence[int],
        joined: Callable[[], Group] | None,
    ) -> None:
        forward = self._forward = runner.forward
        self._runner, self._weights, self._buffers = runner, forward.gather, forward.effects.buffers
        self._group, self.microbatches, self._step_index, self._stepped = group, microbatches, step_index, stepped
        device = self._device = forward.randomness.device
        self._device = device
        self._partners, self._joined = partners, joined
        self._asks: Group | None = None  # inside `join`: who has a microbatch for the step that begins
        self._has_work = [1] * group.size
        self._is_open = self._awaits_step = False
        self._forwards = self._done = 0
        self.ended = ""
        """Why there are no further steps; empty while there are."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for these arguments."""
        if self.ended:
            raise UserError(self.ended)
        if not torch.is_grad_enabled():
            if not self._is_open:
                self._check_writes_nothing()
            passing = nullcontext() if self._is_open else self._weights.step(("loop", "no gradients"))
            with passing, self._forward.intact.forward(trains=self._is_open):
                return self._forward.module(*args, **kwargs)
        if not self._is_open:
            self._open()
        forward = self._group.size * self._forwards + self._group.rank
        self._forwards += 1
        try:
            with keep_generators([self._device]):
                self._forward.randomness.begin(self._step_index(), [forward])
                intact = self._forward.intact.forward()
                with self._weights.watching(), self._forward.keyed(), intact, self._buffers.watching() as gave:
                    output = self._forward.module(*args, **kwargs)
                    gave(output)
                    return output
        except BaseException:
            self.abandon()
            raise

    def switch(self, train: bool) -> None:
        """Puts the module in training or evaluation mode (see Forward.switch)."""
        self._forward.switch(train)

    def _check_writes_nothing(self) -> None:
        """Raises UserError where a forward would write running statistics that no step merges."""
        effects = self._forward.effects
        if self._group.size > 1 and effects.merges_statistics and (name := effects.statistics.written) is not None:
            raise UserError(
                f"a forward without gradients between two steps would change the running statistics of {name}, in "
                "training mode, on this rank alone: call model.eval() before it, or make it after a forward of the "
                "step, before step()"
            )

    def backward(self, loss: Tensor) -> None:
        """Backward of `loss`, the mean of one microbatch. Raises UserError if it is not one number, or one too many in
        this step."""
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UserError(
                f"backward wants the loss of a microbatch, one number that depends on the weights; it got {what}"
            )
        if not self._is_open:
            raise UserError(
                "backward without a forward of this step: call model(...) with gradients enabled before each backward"
            )
        if self._done == self.microbatches:
            raise UserError(
                f"step {self._step_index()} has had its {self.microbatches} backward(s) on this rank: call step() "
                "first, or set gradient_accumulation_steps"
            )
        self._done, self._awaits_step = self._done + 1, True
        sums = Sums(loss.reshape(()), torch.ones((), device=loss.device), {})
        try:
            with self._weights.watching(), self._forward.keyed():
                self._runner.backward(sums, last=self._done == self.microbatches)
        except BaseException:
            self.abandon()
            raise

    def step(self) -> StepResult | None:
        """Updates, after the last microbatch of a step; before it nothing happens, and None is returned.

        Raises UserError without a backward before it, and what Engine.step raises.
        """
        if not self._done:
            raise UserError("step() without a backward before it: call model.backward(loss), not loss.backward()")
        self._awaits_step = False
        return None if self._done < self.microbatches else self._end()

    @contextmanager
    def join(self) -> Iterator[None]:
        """Wraps the loop of all ranks, which may have unequal numbers of microbatches: a rank that has run out answers
        the others' steps with zeros until all are done. A step's objective is the mean over the microbatches that there
        are, also where a rank runs out in the middle of an accumulation; every rank makes every update.

        UserError where ranks meet in their forwards, which a rank without a microbatch cannot make.
        """
        if self._joined is None:
            raise UserError(
                "join(): ranks meet in their forwards here (plan.zero = 3 without shared memory, plan.ep or sync_bn), "
                "and one without data has none: give all ranks as many "
                "microbatches, or train with engine.step, which shares out the batches"
            )
        self._asks = self._joined()
        try:
            yield
            if self._done:
                self._end()
            self.close_step()
            while self._asked(False):
                self._begin()
                self._end()
        finally:
            self._asks, self._has_work = None, [1] * self._group.size

    def _end(self) -> StepResult:
        done, self._is_open, self._done = self._gather(self._done), False, 0
        self._weights.end()
        result = self._runner.end(0, sum(done[place] for place in self._partners if place > self._group.rank), 1.0)
        self._stepped()
        return result

    def _asked(self, has_work: bool) -> bool:
        """Learns which ranks have a microbatch for the step that begins; whether any has."""
        self._has_work = self._gather(int(has_work))
        return any(self._has_work)

    def _gather(self, number: int) -> list[int]:
        """The `number` of each rank; outside `join` all have the same."""
        if self._asks is None:
            return [number] * self._group.size
        mine = torch.full((1,), number, device=self._device)
        return self._asks.all_gather(mine.new_empty(self._asks.size), mine, purpose="join").tolist()

    @property
    def at_boundary(self) -> bool:
        """Whether the microbatch under way, up to its `step()`, is the step's last one."""
        return self._done - self._awaits_step == self.microbatches - 1

    def close_step(self) -> None:
        """Before what belongs between steps: forgets forwards that no backward followed. UserError in the middle of an
        accumulation."""
        if self._done:
            raise UserError(
                f"{self._done} of {self.microbatches} microbatches of step {self._step_index()} are accumulated: do "
                f"this after step()"
            )
        if self._is_open:
            self.abandon()

    def check_between_steps(self) -> None:
        """Does what `close_step` does, before the plan changes. UserError inside `join`, whose ranks are at different
        places of their loops."""
        if self._asks is not None:
            raise UserError("the plan cannot change inside loop.join(): call engine.replan after it, on all ranks")
        self.close_step()

    def abandon(self) -> None:
        """The step under way is forgotten, with its gradients."""
        if self._is_open:
            self._weights.abandon()
        self._is_open = self._awaits_step = False
        self._done = 0

    def _open(self) -> None:
        self._asked(True)
        self._begin()
        self._forwards = 0
        self._weights.begin(("loop", self.microbatches))
        self._is_open = True

    def _begin(self) -> None:
        # The power of two that the losses are divided with comes from one rank's count: under fp16 they then are scaled
        # as DeepSpeed does
        at_work = sum(self._has_work[place] for place in self._partners) if self._runner.keeps_back else 1
        self._runner.begin(self._step_index(), self.microbatches, self.microbatches * at_work)
