"""The record of a run, `metrics.jsonl`: the source of truth that the trackers, the summary and the page are drawn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from shoal.errors import UserError

from .jsonl import as_float, encode_lines, open_for_append, read_lines

COUNTS = 512
"""The most numbers that a step's record has of experts."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One attempt begins: the first one, or one that resumes.

    `world` is the number of ranks, `parameters` the size of the whole model, `peak_flops` the measured matmul peak of all
    ranks together in FLOP/s. `config` maps a key to {"value": ..., "origin": "default" | "file" | "cli" | "planner"}.
    """

    host: str
    device: str
    world: int
    versions: dict[str, str]
    parameters: int
    peak_flops: float
    config: dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One committed step of the whole global batch.

    `loss` is the mean over `tokens` (or samples), `seconds` the wall time of the step, `memory_bytes` the use of rank 0,
    `time` the Unix time at its end. `grad_norm` and `mfu` (0 to 1) are None where they are not known. `loss_scale`: what the loss was multiplied
    with, None without loss scaling; `skipped`: gradients overflowed under it, so that nothing was updated. `imbalance`: how many times the mean of its layer
    the busiest expert was chosen, a mean over the layers with experts; `dropped`: the part (0 to 1) of those choices that capacity has not let through; `tokens_per_expert`: all
    counts, where they are not too many (COUNTS). `norms`: of the gradient by layer, of which `grad_norm` is that of all, in steps that are asked for them.
    """

    step: int
    epoch: int
    loss: float
    grad_norm: float | None
    lr: float
    tokens: int
    seconds: float
    tokens_per_second: float
    mfu: float | None
    memory_bytes: int
    time: float
    loss_scale: float | None = None
    skipped: bool = False
    imbalance: float | None = None
    dropped: float | None = None
    tokens_per_expert: list[list[int]] | None = None
    norms: dict[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class MovesRecord:
    """Bytes that rank 0 `moved` between tiers in a step, by what moves, beside those `planned` (None: there was no plan for this step). `otherwise`: what
    other rules than the plan's would have brought to the device, by rule. Written for the first step of each plan and for recorded steps.
    """

    step: int
    planned: dict[str, int | None]
    moved: dict[str, int]
    otherwise: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """The validation loss, a mean over `tokens`, of the weights at `step`. `accuracy` (0 to 1): of a model that tells classes."""

    step: int
    loss: float
    tokens: int
    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """What the model wrote after `prompt` at `step`; `text` is without the prompt."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint was completed; `path` is relative to the run directory, `seconds` the time training was held up."""

    step: int
    path: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class WarningRecord:
    """Something that a person should know, and that did not stop the training."""

    message: str


@dataclass(frozen=True, kw_only=True)
class EndRecord:
    """The attempt ended by itself, `seconds` after it began; `reason` is a sentence for a person."""

    reason: str
    seconds: float


Record = RunRecord | StepRecord | MovesRecord | EvalRecord | SampleRecord | CheckpointRecord | WarningRecord | EndRecord

KINDS: dict[str, type[Record]] = {
    "run": RunRecord,
    "step": StepRecord,
    "moves": MovesRecord,
    "eval": EvalRecord,
    "sample": SampleRecord,
    "checkpoint": CheckpointRecord,
    "warning": WarningRecord,
    "end": EndRecord,
}
KIND_OF = {record_type: kind for kind, record_type in KINDS.items()}


class MetricsLog:
    """Appends records to `path`, one line each, in the file before `write` returns. A new attempt appends to the same file."""

    def __init__(self, path: Path | str) -> None:
        self._file = open_for_append(Path(path))

    def write(self, record: Record) -> None:
        self._file.write(encode_lines([{"kind": KIND_OF[type(record)], **asdict(record)}]))

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class RunRecords:
    """A run as its last attempt left it: what an earlier attempt did after the step at which a later one resumed is gone.

    `resumed`: after which steps later attempts went on. `run` is None before the first attempt has begun, `end` None while the last attempt runs or if it was killed.
    """

    run: RunRecord | None = None
    steps: tuple[StepRecord, ...] = ()
    moves: tuple[MovesRecord, ...] = ()
    evals: tuple[EvalRecord, ...] = ()
    samples: tuple[SampleRecord, ...] = ()
    checkpoints: tuple[CheckpointRecord, ...] = ()
    warnings: tuple[WarningRecord, ...] = ()
    end: EndRecord | None = None
    attempts: int = 0
    resumed: tuple[int, ...] = ()


def read_metrics(path: Path | str) -> RunRecords:
    """Reads what `MetricsLog` wrote, also while it is being written.

    A torn last line is left out; a damaged line elsewhere is left out too and named in a warning. Of records of one step the
    last one counts. Raises UserError when there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist: {path.parent} is not the directory of a run. Give the directory of a run")
    objects, damaged = read_lines(path)
    records = [record for record in map(_decode, objects) if record is not None]
    unknown = len(objects) - len(records)
    notes = [WarningRecord(message=f"{path.name}: line {number} is damaged and was left out") for number in damaged]
    if unknown:
        notes.append(WarningRecord(message=f"{path.name}: {unknown} records of an unknown form were left out"))
    return _assemble(records, notes)


def _decode(line: dict[str, Any]) -> Record | None:
    """The record of a line, or None when it is of a kind, or lacks a field, that this version does not know."""
    record_type = KINDS.get(line.get("kind", ""))
    if record_type is None:
        return None
    values = {
        field.name: as_float(line[field.name]) if "float" in str(field.type) else line[field.name]
        for field in fields(record_type)
        if field.name in line
    }
    lacking = any(field.default is MISSING and field.name not in values for field in fields(record_type))
    return None if lacking else record_type(**values)


def _assemble(records: Sequence[Record], notes: Sequence[WarningRecord]) -> RunRecords:
    attempts: list[list[Record]] = [[]]
    for record in records:
        if isinstance(record, RunRecord):
            attempts.append([])
        attempts[-1].append(record)
    last = attempts[-1]
    kept = _without_superseded(attempts)
    runs = [record for record in records if isinstance(record, RunRecord)]
    ends = [record for record in last if isinstance(record, EndRecord)]
    return RunRecords(
        run=runs[-1] if runs else None,
        steps=_last_of_a_step([r for r in kept if isinstance(r, StepRecord)]),
        moves=_last_of_a_step([r for r in kept if isinstance(r, MovesRecord)]),
        evals=_last_of_a_step([r for r in kept if isinstance(r, EvalRecord)]),
        samples=tuple(r for r in kept if isinstance(r, SampleRecord)),
        checkpoints=_last_of_a_step([r for r in kept if isinstance(r, CheckpointRecord)]),
        warnings=(*(r for r in kept if isinstance(r, WarningRecord)), *notes),
        end=ends[-1] if ends else None,
        attempts=len(runs),
        resumed=_resumed(attempts),
    )


def _resumed(attempts: Sequence[Sequence[Record]]) -> tuple[int, ...]:
    """The step before the first one of each later attempt, but where a still later one began there or before."""
    begun = [min(steps) for attempt in attempts if (steps := [each.step for each in attempt if isinstance(each, StepRecord)])]
    return tuple(step - 1 for number, step in enumerate(begun) if number and step < min(begun[number + 1 :], default=math.inf) and step > 1)


def _without_superseded(attempts: Sequence[Sequence[Record]]) -> list[Record]:
    """Drops what an attempt recorded at or after the first step that a later attempt committed."""
    kept: list[Record] = []
    resumed_at = float("inf")
    for attempt in reversed(attempts):
        kept[:0] = [record for record in attempt if getattr(record, "step", -1) < resumed_at]
        own = [record.step for record in attempt if isinstance(record, StepRecord)]
        resumed_at = min([resumed_at, *own])
    return kept


class _HasStep(Protocol):
    @property
    def step(self) -> int: ...


HasStep = TypeVar("HasStep", bound=_HasStep)


def _last_of_a_step(records: Sequence[HasStep]) -> tuple[HasStep, ...]:
    by_step = {record.step: record for record in records}
    return tuple(by_step[step] for step in sorted(by_step))


@dataclass(frozen=True)
class RunResult:
    """What came out: the loss of `measure` ("validation", or "training" without evaluations) at the first and last record.

    `tokens` and `seconds` are sums over the steps, `tokens_per_second` their ratio: evaluations and checkpoints are not in it.
    """

    measure: str
    loss_before: float
    loss_after: float
    steps: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def summarize(records: RunRecords) -> RunResult | None:
    """The result so far, or None before the first step."""
    if not records.steps:
        return None
    measured: Sequence[EvalRecord | StepRecord] = records.evals if len(records.evals) > 1 else records.steps
    return RunResult(
        measure="validation" if len(records.evals) > 1 else "training",
        loss_before=measured[0].loss,
        loss_after=measured[-1].loss,
        steps=records.steps[-1].step,
        tokens=sum(record.tokens for record in records.steps),
        seconds=sum(record.seconds for record in records.steps),
    )
