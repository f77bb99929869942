from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UserError
from shoal.report.metrics import (
    CheckpointRecord,
    EndRecord,
    EvalRecord,
    MembershipRecord,
    MetricsLog,
    Record,
    RunRecords,
    SampleRecord,
    StepRecord,
    WarningRecord,
    last_recorded,
    read_metrics,
)
from shoal.report.result import summarize
from tests.report.synthetic import run_record, step_record

pytestmark = pytest.mark.fast


def step(number: int, loss: float = 1.0) -> StepRecord:
    return StepRecord(
        step=number,
        epoch=0,
        loss=loss,
        grad_norm=None,
        lr=0.1,
        tokens=10,
        seconds=2.0,
        tokens_per_second=5.0,
        mfu=None,
        memory_bytes=1,
        time=float(number),
    )


def write(path: Path, *records: Record) -> RunRecords:
    log = MetricsLog(path)
    for record in records:
        log.write(record)
    log.close()
    return read_metrics(path)


def test_every_kind_comes_back_as_it_was_written(tmp_path: Path) -> None:
    records = write(
        tmp_path / "metrics.jsonl",
        run_record(),
        EvalRecord(step=0, loss=5.0, tokens=64),
        step_record(1),
        SampleRecord(step=1, prompt="def ", text="f(\n): 'ü' NaN"),
        CheckpointRecord(step=1, path="checkpoints/step-00000001", seconds=0.5),
        WarningRecord(message="NaN"),
        EndRecord(reason="done", seconds=3.0),
    )
    assert records == RunRecords(
        run=run_record(),
        steps=(step_record(1),),
        evals=(EvalRecord(step=0, loss=5.0, tokens=64),),
        samples=(SampleRecord(step=1, prompt="def ", text="f(\n): 'ü' NaN"),),
        checkpoints=(CheckpointRecord(step=1, path="checkpoints/step-00000001", seconds=0.5),),
        warnings=(WarningRecord(message="NaN"),),
        end=EndRecord(reason="done", seconds=3.0),
        attempts=1,
        begun=((run_record(), 1),),
    )


def test_a_line_has_the_documented_keys(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", step_record(1))
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    expected = (
        "kind step epoch loss grad_norm lr tokens seconds tokens_per_second mfu memory_bytes time loss_scale skipped "
    )
    expected += "imbalance dropped tokens_per_expert norms"
    assert " ".join(line) == expected


@pytest.mark.parametrize("value, written", [(math.inf, "Infinity"), (-math.inf, "-Infinity"), (math.nan, "NaN")])
def test_losses_outside_json_are_strings_in_the_file_and_floats_to_the_reader(
    tmp_path: Path, value: float, written: str
) -> None:
    records = write(tmp_path / "metrics.jsonl", replace(step(1, loss=value), norms={"embed": value}))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)["loss"] == written
    assert repr(records.steps[0].loss) == repr(value)
    assert repr(records.steps[0].norms) == repr({"embed": value})


def test_a_record_is_in_the_file_before_the_log_is_closed(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(step(1))
    assert len(read_metrics(tmp_path / "metrics.jsonl").steps) == 1
    log.close()


@given(cut=st.integers(min_value=1, max_value=10_000))
def test_a_crash_in_the_last_line_loses_that_line_and_no_later_one(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    write(path, run_record(), step(1), step(2))
    content = path.read_bytes()
    last_line = len(content.splitlines()[-1])
    path.write_bytes(content[: len(content) - 1 - cut % last_line])
    torn = cut % last_line > 0
    assert [record.step for record in read_metrics(path).steps] == ([1] if torn else [1, 2])

    resumed = write(path, run_record(), step(2, loss=7.0), step(3))
    assert [(record.step, record.loss) for record in resumed.steps] == [(1, 1.0), (2, 7.0), (3, 1.0)]
    assert resumed.warnings == ()


def test_the_newest_steps_are_those_at_the_end_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (*range(1, 200), 199, 198):
        log.write(step_record(step))
        if step == 100:
            log.write(EvalRecord(step=100, loss=2.0, tokens=10))
    log.close()
    path.write_bytes(path.read_bytes() + b'{"kind": "step", "step": 300')
    assert last_recorded(path) == (199, 100)
    MetricsLog(path).close()  # which cuts the unfinished line off
    assert path.read_bytes().endswith(b"}\n") and last_recorded(path) == (199, 100)
    assert last_recorded(tmp_path / "none") == (0, -1)


def test_steps_that_a_later_generation_has_gone_back_from_are_not_recorded(tmp_path: Path) -> None:
    """Else a step that a rank had made again and not recorded, before it was killed, was nobody's to record."""
    path = tmp_path / "metrics.jsonl"
    again = MembershipRecord(step=10, generation=2, nodes=1, world=1, why="", lost=10, events=[])
    evals = [EvalRecord(step=number, loss=2.0, tokens=1) for number in (10, 20)]
    records = [run_record(), *map(step, range(1, 21)), *evals, run_record(), again]
    write(path, *records)
    assert last_recorded(path) == (10, 10)
    onward = replace(again, step=12, generation=3, lost=0)
    write(path, step(11), run_record(), step(12), onward, step(13))
    assert last_recorded(path) == (13, 10)


def test_curves_have_no_mark_of_a_generation_that_a_later_one_has_gone_back_from(tmp_path: Path) -> None:
    def world(generation: int, step: int, ranks: int) -> MembershipRecord:
        return MembershipRecord(step=step, generation=generation, nodes=1, world=ranks, why="", lost=0, events=[])

    records = write(
        tmp_path / "metrics.jsonl",
        *(run_record(), world(1, 0, 2), *map(step, range(1, 8))),
        *(run_record(), world(2, 7, 3), step(8), run_record(), world(3, 5, 2), *map(step, range(6, 10))),
    )
    assert records.marks == {5: "2 ranks"} and len(records.memberships) == 3


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), step(2), step(3))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:20], lines[2], '{"kind": "from the future"}', ""]))
    records = read_metrics(path)
    assert [record.step for record in records.steps] == [1, 3]
    assert [warning.message for warning in records.warnings] == [
        "metrics.jsonl: line 2 is damaged and was left out",
        "metrics.jsonl: 1 records of an unknown form were left out",
    ]


def test_a_resumed_run_forgets_what_came_after_the_step_at_which_it_resumed(tmp_path: Path) -> None:
    """Steps 1 to 5 with checkpoints at 2 and 4, of which the second is damaged; resumed at 2; killed at 3; resumed at 2
    again."""
    records = write(
        tmp_path / "metrics.jsonl",
        *(run_record(), EvalRecord(step=0, loss=9.0, tokens=1), step(1), step(2)),
        *(CheckpointRecord(step=2, path="2", seconds=0.0), EvalRecord(step=2, loss=8.0, tokens=1), step(3), step(4)),
        *(CheckpointRecord(step=4, path="4", seconds=0.0), EvalRecord(step=4, loss=7.0, tokens=1), step(5)),
        *(SampleRecord(step=5, prompt="", text="old"), EndRecord(reason="interrupted", seconds=1.0)),
        *(run_record(), WarningRecord(message="checkpoint 4 is damaged"), step(3, loss=2.0)),
        *(run_record(), step(3, loss=3.0), step(4, loss=3.0)),
    )
    assert [(record.step, record.loss) for record in records.steps] == [(1, 1.0), (2, 1.0), (3, 3.0), (4, 3.0)]
    assert [(record.step, record.loss) for record in records.evals] == [(0, 9.0), (2, 8.0)]
    assert [record.step for record in records.checkpoints] == [2]
    assert records.samples == ()
    assert [warning.message for warning in records.warnings] == ["checkpoint 4 is damaged"]
    assert records.end is None
    assert records.attempts == 3


def test_resuming_a_finished_run_that_has_nothing_left_to_do_keeps_it_whole(tmp_path: Path) -> None:
    end = EndRecord(reason="all steps are done", seconds=0.1)
    records = write(tmp_path / "metrics.jsonl", run_record(), step(1), step(2), run_record(), end)
    assert [record.step for record in records.steps] == [1, 2]
    assert records.end == end


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not the directory of a run"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_log_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be opened for writing"):
        MetricsLog(tmp_path / "file" / "metrics.jsonl")


def test_the_result_is_the_validation_loss_where_it_was_measured_twice() -> None:
    steps = (step(1, loss=4.0), step(2, loss=3.0))
    evals = (EvalRecord(step=0, loss=5.0, tokens=1), EvalRecord(step=2, loss=2.5, tokens=1))
    validated = summarize(RunRecords(steps=steps, evals=evals))
    assert validated is not None
    assert (validated.measure, validated.loss_before, validated.loss_after) == ("validation", 5.0, 2.5)
    # Twenty tokens in four seconds.
    assert (validated.tokens, validated.seconds, validated.tokens_per_second) == (20, 4.0, 5.0)

    trained = summarize(RunRecords(steps=steps, evals=evals[:1]))
    assert trained is not None
    assert (trained.measure, trained.loss_before, trained.loss_after) == ("training", 4.0, 3.0)
    assert summarize(RunRecords(evals=evals)) is None
