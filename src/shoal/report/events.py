"""The events of a run, from its records: attempts, checkpoints, evaluations, changes of the plan, warnings, the end."""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shoal import units
from shoal.toml import plan_text

from .metrics import (
    CheckpointRecord,
    EndRecord,
    EvalRecord,
    MembershipRecord,
    PlanRecord,
    Record,
    RunRecord,
    StepRecord,
    WarningRecord,
)

FAILED = "failed:"
"""How the reason of an EndRecord begins where training failed."""


@dataclass(frozen=True)
class Event:
    """Something that happened beside training.

    time: Unix time, which is that of the step before where the record has none; None before the first step.
    step: the last step before it; None where only a scheduler knows of it.
    bad: a warning or a failure.
    """

    time: float | None
    step: int | None
    text: str
    bad: bool = False


def events_of(records: Iterable[Record]) -> list[Event]:
    """Returns the events in the order in which they were written."""
    found: list[Event] = []
    time: float | None = None
    step = 0
    for record in records:
        if isinstance(record, StepRecord):
            step, time = record.step, record.time
            if record.skipped:
                found.append(Event(time, step, "gradients overflowed: the step was skipped", bad=True))
            continue
        if isinstance(record, RunRecord):
            time = record.time or time
        tell = _TOLD.get(type(record))
        if tell is not None:
            bad = isinstance(record, WarningRecord) or (
                isinstance(record, EndRecord) and record.reason.startswith(FAILED)
            )
            found.append(Event(time, getattr(record, "step", step), tell(record), bad))
    return found


def event_line(event: Event) -> str:
    """Formats an event as a line: its time, step and text."""
    at = "" if event.time is None else clock.strftime("%m-%d %H:%M:%S", clock.localtime(event.time))
    step = "" if event.step is None else f"step {event.step}"
    return f"{at:14}  {step:11} " + event.text.replace("\n", " ")


def _attempt(record: RunRecord) -> str:
    return f"begins on {record.world} rank{'s' * (record.world > 1)}, rank 0 on {record.host}"


def evaluation_text(record: EvalRecord) -> str:
    """Formats what an evaluation has found."""
    right = "" if record.accuracy is None else f", accuracy {record.accuracy:.1%}"
    return f"validation loss {record.loss:.4f}{right}"


def _membership(record: MembershipRecord) -> str:
    lost = f", {record.lost} step{'s' * (record.lost > 1)} lost" if record.lost else ""
    return f"generation {record.generation} on {record.nodes} node{'s' * (record.nodes > 1)}: {record.why}{lost}"


_TOLD: dict[type, Callable[[Any], str]] = {
    RunRecord: _attempt,
    EvalRecord: evaluation_text,
    CheckpointRecord: lambda record: f"checkpoint {record.path} ({units.duration(record.seconds)})",
    MembershipRecord: _membership,
    PlanRecord: lambda record: f"the plan is {plan_text(record.plan)} ({units.duration(record.seconds)})",
    WarningRecord: lambda record: record.message,
    EndRecord: lambda record: f"ends: {record.reason}",
}
