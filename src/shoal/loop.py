"""A training loop that the caller owns, over the phases of a step: forwards and backwards come one by one, the update when it is asked for.

    loop(...)           opens a step where none is open, and runs the module in it
    loop.backward(loss) one microbatch; gradients go out during the step's last one
    loop.step()         after the last one: reduce, ballot, clip, vote, apply

The loss of a microbatch is a mean, and a step's objective the mean of them over ranks and microbatches: (sum, count) = (loss, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shoal.chunks import Passing
from shoal.comm import Group
from shoal.errors import UserError
from shoal.loss import Sums
from shoal.random import Randomness
from shoal.result import StepResult
from shoal.step import StepRunner


def callers_loss(model: nn.Module, microbatch: Mapping[str, Tensor]) -> NoReturn:
    """Stands for the loss of an engine whose loop is the caller's, who computes it."""
    raise UserError(
        "this engine has no loss function, since its loop is the caller's: engine.step, evaluate and objective need one"
    )


class Loop:
    """Steps of `microbatches` forwards and backwards on each rank, all of which make them alike.

    `step_index()` numbers the step; `stepped()` is called after each. A forward without gradients belongs to no step; where weights pass
    (plan.zero = 3 without shared memory), or tokens travel to experts (plan.ep), all ranks make those alike too. What the module draws is keyed by step, rank and forward;
    torch's generators are the caller's again afterwards.
    """

    def __init__(
        self,
        module: nn.Module,
        runner: StepRunner,
        randomness: Randomness,
        passing: Passing | None,
        group: Group,
        microbatches: int,
        step_index: Callable[[], int],
        stepped: Callable[[], None],
    ) -> None:
        self._module, self._runner, self._randomness, self._passing = module, runner, randomness, passing
        self._group, self.microbatches, self._step_index, self._stepped = group, microbatches, step_index, stepped
        self._devices = [randomness.device.index] if randomness.device.type == "cuda" else []
        self._is_open = self._awaits_step = False
        self._forwards = self._done = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for these arguments."""
        if not torch.is_grad_enabled():
            with nullcontext() if self._passing is None or self._is_open else self._passing.step(("loop", "no gradients")):
                return self._module(*args, **kwargs)
        if not self._is_open:
            self._open()
        forward = self._group.size * self._forwards + self._group.rank
        self._forwards += 1
        try:
            with torch.random.fork_rng(self._devices), self._watching(), self._runner.keyed(), self._runner.watching() as gave:
                self._randomness.begin(self._step_index(), [forward])
                output = self._module(*args, **kwargs)
                gave(output)
                return output
        except BaseException:
            self.abandon()
            raise

    def backward(self, loss: Tensor) -> None:
        """Backward of `loss`, the mean of one microbatch. Raises UserError if it is not one number, or one too many in this step."""
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UserError(f"backward wants the loss of a microbatch, one number that depends on the weights; it got {what}")
        if not self._is_open:
            raise UserError(
                "backward without a forward of this step: call model(...) with gradients enabled before each backward"
            )
        if self._done == self.microbatches:
            raise UserError(
                f"step {self._step_index()} has had its {self.microbatches} backward(s) on this rank: call step() first, or set "
                "gradient_accumulation_steps"
            )
        self._done, self._awaits_step = self._done + 1, True
        sums = Sums(loss.reshape(()), torch.ones((), device=loss.device), {})
        try:
            with self._watching(), self._runner.keyed():
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
        if self._done < self.microbatches:
            return None
        self._is_open, self._done = False, 0
        if self._passing is not None:
            self._passing.end()
        result = self._runner.end(0, (self._group.size - 1 - self._group.rank) * self.microbatches, 1.0)
        self._stepped()
        return result

    @property
    def at_boundary(self) -> bool:
        """Whether the microbatch under way, up to its `step()`, is the step's last one."""
        return self._done - self._awaits_step == self.microbatches - 1

    def close_step(self) -> None:
        """Before what belongs between steps: forgets forwards that no backward followed. UserError in the middle of an accumulation."""
        if self._done:
            raise UserError(
                f"{self._done} of {self.microbatches} microbatches of step {self._step_index()} are accumulated: do this after step()"
            )
        if self._is_open:
            self.abandon()

    def abandon(self) -> None:
        """The step under way is forgotten, with its gradients."""
        if self._is_open and self._passing is not None:
            self._passing.abandon()
        self._is_open = self._awaits_step = False
        self._done = 0

    def _open(self) -> None:
        # The power of two that the losses are divided with comes from this rank's count: under fp16 they then are scaled as DeepSpeed does
        self._runner.begin(self._step_index(), self.microbatches, self.microbatches)
        self._forwards = 0
        if self._passing is not None:
            self._passing.begin(("loop", self.microbatches))
        self._is_open = True

    def _watching(self) -> Any:
        return nullcontext() if self._passing is None else self._passing.watching()
