"""The record of a run, `metrics.jsonl`: the source of truth for the trackers, the summary and the page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from shoal.errors import UserError

from .changes import (
    CheckpointRecord,
    EndRecord,
    MembershipRecord,
    MovesRecord,
    PlanRecord,
    SampleRecord,
    ServerRecord,
    TermsRecord,
    TriedRecord,
    WarningRecord,
    standing,
)
from .jsonl import GENERATION, as_float, encode_lines, newest_step, open_for_append, read_lines
from .rounds import RoundRecord

COUNTS = 512
"""The most counts of tokens per expert in a step's record."""
_END_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The beginning of an attempt: the first one, or one that resumes.

    world: number of ranks.
    parameters: number of parameters of the whole model.
    peak_flops: measured peak of matrix products of all ranks together, FLOP/s.
    config: {"value": ..., "origin": "default" | "file" | "cli" | "planner"} by dotted key.
    total: number of steps of the whole run; None where it is not known.
    time: Unix time at which the attempt began.
    threads: of a rank. on_host: number of ranks on the host of rank 0.
    """

    host: str
    device: str
    world: int
    versions: dict[str, str]
    parameters: int
    peak_flops: float
    config: dict[str, dict[str, Any]]
    total: int | None = None
    time: float | None = None
    threads: int | None = None
    on_host: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One committed step of the whole global batch.

    loss: mean over `tokens` (or samples).
    grad_norm, mfu: None where not known; MFU is 0 to 1.
    seconds: wall time of the step.
    memory_bytes: memory use of rank 0.
    time: Unix time at its end.
    loss_scale: factor of the loss; None without loss scaling.
    skipped: gradients overflowed under the loss scale, so nothing was updated.
    imbalance: choices of the busiest expert of a layer relative to the mean, averaged over layers with experts.
    dropped: share (0 to 1) of the choices of experts that were over capacity.
    tokens_per_expert: counts by layer and expert, where there are at most COUNTS.
    norms: gradient norms by layer, in the steps for which they were requested.
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
class EvalRecord:
    """The validation loss at `step`, a mean over `tokens`, and the `accuracy` (0 to 1) of a classifier."""

    step: int
    loss: float
    tokens: int
    accuracy: float | None = None


Record = (
    RunRecord
    | StepRecord
    | MovesRecord
    | EvalRecord
    | SampleRecord
    | CheckpointRecord
    | PlanRecord
    | TriedRecord
    | TermsRecord
    | MembershipRecord
    | RoundRecord
    | ServerRecord
    | WarningRecord
    | EndRecord
)

KINDS: dict[str, type[Record]] = {
    "run": RunRecord,
    "step": StepRecord,
    "moves": MovesRecord,
    "eval": EvalRecord,
    "sample": SampleRecord,
    "checkpoint": CheckpointRecord,
    "plan": PlanRecord,
    "tried": TriedRecord,
    "terms": TermsRecord,
    GENERATION: MembershipRecord,
    "round": RoundRecord,
    "server": ServerRecord,
    "warning": WarningRecord,
    "end": EndRecord,
}
KIND_OF = {record_type: kind for kind, record_type in KINDS.items()}


class MetricsLog:
    """Appends records to `path`, one line each; a line is in the file when `write` returns."""

    def __init__(self, path: Path | str) -> None:
        self._file = open_for_append(Path(path))

    def write(self, record: Record) -> None:
        self._file.write(encode_lines([{"kind": KIND_OF[type(record)], **asdict(record)}]))

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class RunRecords:
    """A run as its last attempt left it, without the steps of earlier attempts that a later attempt repeated.

    run: None before the first attempt has begun.
    end: None while the last attempt runs, or if it was killed.
    attempts: number of attempts.
    begun: of each attempt that has trained its beginning, None where it was not recorded, and its first step.
    """

    run: RunRecord | None = None
    steps: tuple[StepRecord, ...] = ()
    moves: tuple[MovesRecord, ...] = ()
    evals: tuple[EvalRecord, ...] = ()
    samples: tuple[SampleRecord, ...] = ()
    checkpoints: tuple[CheckpointRecord, ...] = ()
    plans: tuple[PlanRecord, ...] = ()
    tried: tuple[TriedRecord, ...] = ()
    terms: tuple[TermsRecord, ...] = ()
    memberships: tuple[MembershipRecord, ...] = ()
    rounds: tuple[RoundRecord, ...] = ()
    servers: tuple[ServerRecord, ...] = ()
    warnings: tuple[WarningRecord, ...] = ()
    end: EndRecord | None = None
    attempts: int = 0
    begun: tuple[tuple[RunRecord | None, int], ...] = ()

    @property
    def resumed(self) -> tuple[int, ...]:
        """The step before the first step of each later attempt, unless a still later one began there or before."""
        first = [step for _, step in self.begun]
        left = dict.fromkeys(min(first[number:]) for number in range(1, len(first)))
        return tuple(step - 1 for step in left if step > 1)

    @property
    def marks(self) -> dict[int, str]:
        """The steps after which something else than training happened, with a word for it."""
        worlds = {each.step: f"{each.world} ranks" for each in standing(self.memberships) if each.generation > 1}
        plans = dict.fromkeys((each.step for each in self.plans), "plan")
        return plans | dict.fromkeys(self.resumed, "resumed") | worlds


def read_metrics(path: Path | str) -> RunRecords:
    """Reads the records of `MetricsLog`, also while they are being written.

    An incomplete last line is left out; other damaged lines are left out with a warning. The last of several records of
    one step counts. Raises UserError when there is no such file.
    """
    if not (path := Path(path)).is_file():
        where = f"{path} does not exist: {path.parent} is not the directory of a run"
        raise UserError(f"{where}. Give the directory of a run")
    objects, damaged = read_lines(path)
    records = [record for record in map(decode, objects) if record is not None]
    unknown = len(objects) - len(records)
    notes = [WarningRecord(message=f"{path.name}: line {number} is damaged and was left out") for number in damaged]
    if unknown:
        notes.append(WarningRecord(message=f"{path.name}: {unknown} records of an unknown form were left out"))
    return assemble(records, notes)


def last_recorded(path: Path | str) -> tuple[int, int]:
    """Returns the last steps that a run has recorded: a trained one, 0 for none, and an evaluated one, -1 for none. For
    the one who goes on with it; reads only the end of the file, as far as a few records reach."""
    with suppress(FileNotFoundError), Path(path).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
        lines = file.read().split(b"\n")[::-1]
        return newest_step(lines, "step", 0), newest_step(lines, "eval", -1)
    return 0, -1


def decode(line: dict[str, Any]) -> Record | None:
    """Returns the record of a line; None for an unknown kind, or where a field is missing."""
    record_type = KINDS.get(line.get("kind", ""))
    if record_type is None:
        return None
    values = {
        field.name: _floats(line[field.name]) if "float" in str(field.type) else line[field.name]
        for field in fields(record_type)
        if field.name in line
    }
    lacking = any(field.default is MISSING and field.name not in values for field in fields(record_type))
    return None if lacking else record_type(**values)


def _floats(value: Any) -> Any:
    return [as_float(each) for each in value] if isinstance(value, list) else as_float(value)


def assemble(records: Sequence[Record], notes: Sequence[WarningRecord] = ()) -> RunRecords:
    """Returns the run of `records`, which are all that were written, in order."""
    attempts: list[list[Record]] = [[]]
    for record in records:
        if isinstance(record, RunRecord):
            attempts.append([])
        attempts[-1].append(record)
    kept = _without_superseded(attempts)
    runs = [each for each in records if isinstance(each, RunRecord)]
    ends = [each for each in attempts[-1] if isinstance(each, EndRecord)]
    return RunRecords(
        run=runs[-1] if runs else None,
        steps=_last_of_a_step([r for r in kept if isinstance(r, StepRecord)]),
        moves=_last_of_a_step([r for r in kept if isinstance(r, MovesRecord)]),
        evals=_last_of_a_step([r for r in kept if isinstance(r, EvalRecord)]),
        samples=tuple(r for r in kept if isinstance(r, SampleRecord)),
        checkpoints=_last_of_a_step([r for r in kept if isinstance(r, CheckpointRecord)]),
        memberships=tuple(r for r in records if isinstance(r, MembershipRecord)),
        rounds=_last_of_a_step([r for r in kept if isinstance(r, RoundRecord)]),
        servers=_last_of_a_step([r for r in kept if isinstance(r, ServerRecord)]),
        plans=_last_of_a_step([r for r in kept if isinstance(r, PlanRecord)]),
        tried=tuple(r for r in kept if isinstance(r, TriedRecord)),
        terms=_last_of_a_step([r for r in kept if isinstance(r, TermsRecord)]),
        warnings=(*(r for r in kept if isinstance(r, WarningRecord)), *notes),
        end=ends[-1] if ends else None,
        attempts=len(runs),
        begun=_begun(attempts),
    )


def _begun(attempts: Sequence[Sequence[Record]]) -> tuple[tuple[RunRecord | None, int], ...]:
    return tuple(
        (attempt[0] if isinstance(attempt[0], RunRecord) else None, min(steps))
        for attempt in attempts
        if (steps := [each.step for each in attempt if isinstance(each, StepRecord)])
    )


def _without_superseded(attempts: Sequence[Sequence[Record]]) -> list[Record]:
    """Drops the records of an attempt from the first step on that a later attempt committed."""
    kept: list[Record] = []
    resumed_at = float("inf")
    for attempt in reversed(attempts):
        kept[:0] = [record for record in attempt if getattr(record, "step", -1) < resumed_at]
        own = [record.step for record in attempt if isinstance(record, StepRecord)]
        resumed_at = min([resumed_at, *own])
    return kept


HasStep = TypeVar(
    "HasStep", StepRecord, MovesRecord, EvalRecord, CheckpointRecord, PlanRecord, RoundRecord, ServerRecord, TermsRecord
)


def _last_of_a_step(records: Sequence[HasStep]) -> tuple[HasStep, ...]:
    by_step = {record.step: record for record in records}
    return tuple(by_step[step] for step in sorted(by_step))
