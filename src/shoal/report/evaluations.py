"""What an evaluator beside the run found: `eval` records in a file of its own, since the run writes metrics.jsonl."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .metrics import EvalRecord, RunRecords, read_metrics

EVALUATIONS = "evaluations.jsonl"


def read_evaluations(run_dir: Path) -> tuple[EvalRecord, ...]:
    """Returns the evaluator's records in the order of their steps, the last one of each step."""
    path = run_dir / EVALUATIONS
    return read_metrics(path).evals if path.is_file() else ()


def with_evaluations(records: RunRecords, run_dir: Path) -> RunRecords:
    """Returns the run's records with the evaluator's of the steps at which the run did not evaluate itself."""
    by_step = {each.step: each for each in (*read_evaluations(run_dir), *records.evals)}
    return replace(records, evals=tuple(by_step[step] for step in sorted(by_step)))
