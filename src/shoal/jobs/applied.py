"""Which steps of a run were applied: under a loss scale one whose gradients overflow updates nothing."""

from __future__ import annotations

import math

from shoal.engine import Engine
from shoal.errors import TrainingError
from shoal.training.result import StepResult


class Applied:
    """Counts the steps of an attempt, and those that the loss scale has skipped. `last`: the result of the last one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._begun = engine.step_index, self._skipped
        self.last: StepResult | None = None

    @property
    def _skipped(self) -> int:
        """Steps of the run that were skipped."""
        return 0 if self._engine.loss_scale is None else int(self._engine.loss_scale.skipped)

    def why_ended(self, stopped: str | None, total: int | None) -> str:
        """Returns why training ended, and how many steps were skipped. stopped: None after the last of `total`."""
        if not (skipped := self._skipped):
            return stopped or f"all {total} steps were trained"
        over = stopped or f"all {total} steps are over"
        return f"{over}; {skipped} of {self._engine.step_index} were skipped: gradients overflowed under the loss scale"

    def check(self, reason: str) -> None:
        """Raises TrainingError where all steps of the run were skipped; or all of this attempt, and the loss is not
        finite, which no scale changes. reason: why training ended."""
        loss = math.inf if self.last is None else self.last.loss
        broken = self.last is not None and not math.isfinite(loss)
        steps, skipped = self._begun if broken else (0, 0)
        if self._skipped == skipped or self._skipped - skipped != self._engine.step_index - steps:
            return
        scale = 'give train.precision a smaller "initial_scale_power", or more steps, or take "bf16"'
        why = f"the loss is {loss}: weights or data are not finite" if broken else scale
        raise TrainingError(f"no step was applied: {reason}; {why}")
