"""The outcome of a run, computed from its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .metrics import EvalRecord, RunRecords, StepRecord


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run.

    measure: whose loss it is: "validation", or "training" without evaluations.
    loss_before, loss_after: at the first and at the last record.
    tokens, seconds: sums over the steps, without evaluations and checkpoints.
    mfu: of the time of all steps of which it is known; None where it is of none.
    """

    measure: str
    loss_before: float
    loss_after: float
    steps: int
    tokens: int
    seconds: float
    mfu: float | None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def summarize(records: RunRecords) -> RunResult | None:
    """Returns the result so far, or None before the first step."""
    if not records.steps:
        return None
    used = [(record.mfu, record.seconds) for record in records.steps if record.mfu is not None and record.seconds > 0]
    measured: Sequence[EvalRecord | StepRecord] = records.evals if len(records.evals) > 1 else records.steps
    return RunResult(
        measure="validation" if len(records.evals) > 1 else "training",
        loss_before=measured[0].loss,
        loss_after=measured[-1].loss,
        steps=records.steps[-1].step,
        tokens=sum(record.tokens for record in records.steps),
        seconds=sum(record.seconds for record in records.steps),
        mfu=sum(mfu * seconds for mfu, seconds in used) / sum(seconds for _, seconds in used) if used else None,
    )
