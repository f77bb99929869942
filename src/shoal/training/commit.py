"""Commit: the vote whether a step's update is applied, and the update.

Loss and norm are the same bits on all ranks whose replicas are to stay equal, so all of them vote alike without a word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.device import is_accelerator
from shoal.errors import TrainingError
from shoal.exchange import Holds
from shoal.parallel.axis import in_order
from shoal.training.clip import Clipped
from shoal.training.forward import Forward
from shoal.training.reduce import Reduce
from shoal.training.result import StepResult
from shoal.training.setup import StepGroups, Trained


class Commit:
    """Applies updates. `groups`: the ranks that an error speaks for; None where stages update by themselves, and each
    tells its own."""

    def __init__(self, forward: Forward, trained: Trained, reduce: Reduce, groups: StepGroups | None) -> None:
        self._effects, self._device = forward.effects, forward.randomness.device
        self._trained, self._reduce, self._groups = trained, reduce, groups
        self._unread: StepResult | None = None

    @property
    def is_read(self) -> bool:
        """Whether no number of the last step waits to be read on the device."""
        return self._unread is None

    def apply(self, result: StepResult, clipped: Clipped, untouched: Sequence[str]) -> None:
        """Applies the update of `result`'s step if loss and norm are finite, and raises TrainingError if they are not.

        `untouched`: the parameters that no backward of the step has reached.
        """
        trained, step = self._trained, result.step
        holds, scale = trained.algorithm.holds(step), trained.scale
        trained.optimizer.rows, trained.optimizer.turn = self._reduce.rows, step
        late, untouched = holds is Holds.LATE, trained.algorithm.due(step, untouched)
        if holds is Holds.NOTHING:
            self._require_finite(result)
            return  # the schedule counts updates
        overflow, count = result._overflow(), result._totals[1]
        skip = ~torch.isfinite(result._norm) if late else overflow | (count == 0)
        result._send()
        if is_accelerator(self._device) and trained.algorithm.skips_on_device(step):
            self._update(step, clipped, count * ~skip, skip.float(), untouched)
            self._effects.experts.balance(skip)
            self._unread = result
        elif result.count == 0 and not (late and math.isfinite(result.grad_norm)):
            pass  # every label is ignored: there is no mean, and nothing to learn from
        elif not result.skipped:
            self._require_finite(result)
            self._update(step, clipped, count, None, untouched)
            self._effects.experts.balance()
        if scale is not None:
            scale.update(overflow)
            if self._unread is None:
                self._require_finite(result)
        if trained.scheduler is not None:
            trained.scheduler.step()

    def share(self) -> None:
        """Brings the updated weights together, where ranks own parts of them. State that only this rank has is by then
        that of the next step."""
        self._trained.optimizer.share()

    def settle(self) -> StepResult | None:
        """Raises what the last step left unread on the device, and returns that step's result; None where nothing
        was."""
        unread, self._unread = self._unread, None
        if unread is not None:
            self._require_finite(unread)
        return unread

    def _update(
        self, step: int, clipped: Clipped, count: Tensor, skip: Tensor | None, untouched: Sequence[str]
    ) -> None:
        algorithm, buddy = self._trained.algorithm, self._trained.buddy
        if buddy is not None:
            buddy.made(step, clipped.factor, skip, untouched)
        algorithm.update(step, clipped.factor, skip, untouched)
        algorithm.renew(clipped.to_mean, skip, untouched)
        algorithm.counted(count)

    def _require_finite(self, result: StepResult) -> None:
        """Raises TrainingError, on all ranks alike, where loss or norm are not finite and no smaller loss scale would
        help."""
        if result.count == 0 or (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            return
        scale, optimizer = self._trained.scale, self._trained.optimizer
        if scale is not None and not bool(scale.stuck):
            return  # skipped
        self._effects.statistics.restore()
        what = (
            f"the loss is {result.loss}"
            if not math.isfinite(result.loss)
            else f"the gradient norm is {result.grad_norm} (the loss is {result.loss:.6g})"
        )
        # In the order in which gradients come: the first is nearest to the cause.
        broken = self._of_all_owners([name for name in optimizer.known if not optimizer.grad(name).isfinite().all()])
        known = self._of_all_owners(list(optimizer.known))
        weights = self._of_all_owners(
            [name for name, value in optimizer.masters().items() if not value.isfinite().all()]
        )
        broken.reverse()
        where = (
            f"first parameter with a gradient that is not finite: {broken[0]} ({len(broken)} of {len(known)})"
            if broken
            else "gradients are finite"
        )
        if weights:
            where += f"; weights already not finite: {weights[0]}"
        if result.loss_scale is not None:
            where += f"; it overflows at every loss scale down to {result.loss_scale:g}"
        raise TrainingError(
            f"{what}; {where}. The update was not applied. A lower learning rate, a longer warm-up, clipping, or the "
            "data of this step are the usual places to look",
            result.step,
        )

    def _of_all_owners(self, names: list[str]) -> list[str]:
        """Adds the names that other owners of a cut model, or of cut chunks, have found: in the module's order, stage
        by stage."""
        groups, order = self._groups, self._trained.parameters
        if groups is None:
            return names
        told = [names]
        if any(chunk.is_cut or chunk.spec.variant for chunk in self._trained.algorithm.replica.chunks):
            told = groups.partners.all_gather_object(names)
        names = in_order(told, order)
        for axis in groups.axes:
            names = axis.gather_names(names, order)
        return names
