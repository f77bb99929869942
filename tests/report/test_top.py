"""The screen of `shoal top`, its curve, and the reader of a record that grows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from shoal.report.changes import ServerRecord
from shoal.report.events import Event, events_of
from shoal.report.follow import Follower
from shoal.report.metrics import (
    CheckpointRecord,
    EndRecord,
    EvalRecord,
    MembershipRecord,
    MetricsLog,
    PlanRecord,
    Record,
    WarningRecord,
    assemble,
    read_metrics,
)
from shoal.report.page import render
from shoal.report.top import RankRow, View, frame, recorded_ranks, sparkline
from tests.report.synthetic import BEGAN, run_record, step_record, write_run

pytestmark = pytest.mark.fast


def shown(view: View, width: int = 80, height: int = 24) -> list[str]:
    console = Console(width=width, height=height)
    with console.capture() as captured:
        console.print(frame(view, width, height))
    return [line.rstrip() for line in captured.get().splitlines()]


def view(records: list[Record], ranks: list[RankRow] | None = None, word: str = "trains") -> View:
    goes_on = word in ("trains", "starting", "silent")
    return View("runs/one", (word, ""), goes_on, assemble(records), events_of(records), ranks or [])


@pytest.mark.parametrize(
    ("values", "width", "curve"),
    [
        ([], 10, ""),
        ([3.0], 10, "▁"),
        ([2.0, 2.0], 10, "▁▁"),
        ([0.0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([7.0, 7, 0, 0], 2, "█▁"),
        ([0.0, math.nan, 7], 3, "▁×█"),
        ([0.0, 0, math.inf, 7], 2, "▁█"),
        ([math.nan], 3, "×"),
        ([1.0, 2.0], 0, ""),
        ([1.0, 2.0], -5, ""),
    ],
)
def test_a_curve(values: list[float], width: int, curve: str) -> None:
    assert sparkline(values, width) == curve


def test_the_screen_of_a_run_under_way() -> None:
    run = replace(run_record(), total=400, time=BEGAN)
    steps = [replace(step_record(n), time=BEGAN + n, seconds=1.0, tokens=1000, mfu=None) for n in range(1, 101)]
    records = [
        run,
        EvalRecord(step=0, loss=5.5, tokens=9),
        *steps,
        EvalRecord(step=100, loss=2.25, tokens=9, accuracy=0.5),
    ]
    ranks = [RankRow(0, pid=41, memory=2**30, cpu=0.5), RankRow(1, pid=42, memory=2**29, cpu=1.0)]
    lines = shown(view(records, ranks))
    assert lines[:3] == ["runs/one  trains", "2 ranks on cpu, 1 thread a rank, 1.06M parameters", "━" * 72]
    assert lines[3].startswith("step 100/400  loss ") and "1.00k tok/s  ETA 5 min 00 s" in lines[3]
    assert lines[4].startswith(f"loss  {steps[0].loss:.4f} █") and lines[4].endswith(f"{steps[-1].loss:.4f}")
    assert len(lines[4]) == 80
    assert lines[5] == "validation 2.2500, accuracy 50.0% at step 100"
    assert lines[6] == "plan  dp = 2"
    assert [line.split() for line in lines[8:11]] == [
        ["rank", "pid", "memory", "CPU"],
        ["0", "41", "1.00", "GiB", "50%"],
        ["1", "42", "512", "MiB", "100%"],
    ]
    assert lines[-1].endswith("step 100    validation loss 2.2500, accuracy 50.0%")


def test_a_small_window_keeps_the_last_events_and_every_line_fits() -> None:
    checkpoints = [CheckpointRecord(step=n, path=f"checkpoints/step-{n:08}", seconds=0.1) for n in range(1, 40)]
    records = [run_record(), step_record(1), *checkpoints]
    for width, height in ((40, 12), (100, 30)):
        lines = shown(view(records), width, height)
        assert len(lines) < height and max(map(len, lines)) <= width
        assert "step 39" in lines[-1]
    many = shown(view(records, [RankRow(rank, pid=rank) for rank in range(64)]), 80, 10)
    assert "56 more" in "".join(many) and "step 39" in many[-1]


def test_before_the_first_step_and_after_the_last() -> None:
    assert shown(replace(view([], word="starting"), name="a/long/name"), width=16)[0] == "…/name  starting"
    assert shown(view([], word="starting")) == ["runs/one  starting", "no step yet"]
    run = replace(run_record(), total=400)
    ended = shown(
        view([run, step_record(400), EndRecord(reason="all 400 steps were trained", seconds=9.0)], word="ended")
    )
    assert "ETA" not in "".join(ended) and ended[-1].endswith("ends: all 400 steps were trained")


def test_the_plan_is_that_of_this_attempt() -> None:
    change = PlanRecord(step=1, plan={"dp": 1, "tp": 2}, seconds=0.1)
    first = [run_record(), step_record(1), change, step_record(2)]
    assert "plan  dp = 1, tp = 2" in shown(view(first))
    assert "plan  dp = 2" in shown(view([*first, run_record(), step_record(3)]))


def test_the_plan_of_an_attempt_that_goes_on_has_the_changes_by_step_before_it() -> None:
    run = run_record()
    at = [{"step": 1, "plan": {"tp": 2}}, {"step": 3, "plan": {"zero": 1}}]
    run = replace(run, config={**run.config, "run.at": {"value": at, "origin": "file"}})
    records = [run, step_record(1), run, step_record(2)]
    assert "plan  tp = 2" in shown(view(records)), "made after step 1, before this attempt"


def test_the_pace_leaves_out_the_pause_between_two_attempts() -> None:
    run = replace(run_record(), total=20)
    steps = [replace(step_record(n), time=BEGAN + n, seconds=1.0) for n in range(1, 11)]
    later = [replace(step_record(n), time=BEGAN + 5000 + n, seconds=1.0) for n in range(11, 16)]
    assert "ETA 5.0 s" in shown(view([run, *steps, run, *later]))[3]


def test_events_have_the_time_of_the_step_before() -> None:
    skipped = replace(step_record(2), skipped=True)
    records = [
        replace(run_record(), time=5.0),
        WarningRecord(message="[red]slow[/] disk"),
        step_record(1),
        CheckpointRecord(step=1, path="checkpoints/step-1", seconds=1.0),
        skipped,
        MembershipRecord(step=2, generation=2, nodes=1, world=2, why="node a is gone", lost=3, events=[]),
        EndRecord(reason="failed: step 3: loss is nan", seconds=1.0),
    ]
    first = step_record(1).time
    assert events_of(records) == [
        Event(5.0, 0, "begins on 2 ranks, rank 0 on laptop"),
        Event(5.0, 0, "[red]slow[/] disk", bad=True),
        Event(first, 1, "checkpoint checkpoints/step-1 (1.0 s)"),
        Event(skipped.time, 2, "gradients overflowed: the step was skipped", bad=True),
        Event(skipped.time, 2, "generation 2 on 1 node: node a is gone, 3 steps lost"),
        Event(skipped.time, 2, "ends: failed: step 3: loss is nan", bad=True),
    ]
    assert any("[red]slow[/] disk" in line for line in shown(view(records)))


def test_ranks_of_the_last_recorded_step(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "timeline.jsonl").open("a").write('{"step": 10000, "rank"')  # a torn line
    ranks = recorded_ranks(tmp_path)
    assert set(ranks) == {0, 1} and ranks[0].compute and ranks[1].comm
    assert recorded_ranks(tmp_path / "nowhere") == {}


def test_a_record_that_grows_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert not follower.read()  # nothing there yet
    log = MetricsLog(path)
    log.write(run_record())
    assert follower.read() and not follower.read()
    whole = step_record(1), step_record(2)
    log.write(whole[0])
    log.close()
    with path.open("ab") as file:
        file.write(b'{"kind": "step", "step": 2, "ep')  # its writer was killed
    assert follower.read() and follower.records[-1] == whole[0]
    assert not follower.read()
    log = MetricsLog(path)  # cuts the torn line off
    log.write(whole[1])
    assert follower.read() and follower.records == [run_record(), *whole]
    assert assemble(follower.records) == read_metrics(path) and follower.damaged == 0


def test_a_damaged_line_is_counted_and_a_new_file_is_read_anew(tmp_path: Path) -> None:
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other.jsonl"
    path.write_bytes(b'\x00\x00\n{"kind": "step"}\n[]\n')
    follower = Follower(path)
    follower.read()
    assert (follower.records, follower.damaged) == ([], 3)
    MetricsLog(other).write(run_record())
    other.replace(path)
    assert follower.read() and (follower.records, follower.damaged) == ([run_record()], 0)


@pytest.mark.parametrize(
    "servers, named, table",
    [
        ([], "server staleness:2, clients", "<td>gone</td>"),
        ([1234, 900], "servers staleness:2 on 2 of 1,234, 900 parameters, clients", "<td>1,234</td><td>900</td>"),
    ],
)
def test_parameter_servers_are_shown(tmp_path, servers, named, table):
    record = ServerRecord(
        step=9,
        policy="staleness:2",
        clients=[{"client": 0, "pushes": 5, "here": True}, {"client": 1, "pushes": 4, "here": False}],
        pushes=9,
        dropped=1,
        scaled=0,
        staleness={"0": 6, "2": 3},
        lags={"0": 9},
        servers=servers,
    )
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(record)
    log.close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    seen = "\n".join(shown(View("run", ("trains", ""), True, records, (), ()), 200))
    line = f"{named} (gradients) 0 (5); 9 gradients, 1 dropped, 0 scaled; staleness 0: 6, 2: 3"
    assert line in seen
    page = render("run", records, [], [])
    assert (
        "<td>gone</td>" in page
        and table in page
        and "Under the policy staleness:2, 9 gradients have made 9 updates" in page
    )
