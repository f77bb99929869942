from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.report.jsonl import GoesOn, JsonLog
from shoal.report.timeline import Span, overlap, read_timeline, to_chrome_trace
from tests.report.synthetic import step_spans

pytestmark = pytest.mark.fast


def span(
    lane: str, start: float, stop: float, *, step: int = 1, rank: int = 0, name: str = "x", bytes: int = 0
) -> Span:
    return Span(step=step, rank=rank, lane=lane, name=name, start=start, seconds=stop - start, bytes=bytes)  # type: ignore[arg-type]


def test_spans_come_back_and_torn_or_foreign_lines_do_not(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    log = JsonLog(path)
    log.write(step_spans(1))
    log.close()
    with path.open("a") as file:
        file.write('{"step": 1}\n{"step": 2, "rank"')
    assert read_timeline(path) == step_spans(1)
    assert read_timeline(tmp_path / "absent.jsonl") == []


def test_a_line_has_the_documented_keys(tmp_path: Path) -> None:
    log = JsonLog(tmp_path / "timeline.jsonl")
    log.write([span("comm", 1.0, 3.0, name="chunk 0", bytes=8)])
    log.close()
    expected = {
        "step": 1,
        "rank": 0,
        "lane": "comm",
        "name": "chunk 0",
        "start": 1.0,
        "seconds": 2.0,
        "bytes": 8,
        "phase": "compute",
    }
    assert json.loads((tmp_path / "timeline.jsonl").read_text()) == expected


def test_a_resumed_run_replaces_the_steps_that_it_records_again(tmp_path: Path) -> None:
    log = JsonLog(tmp_path / "timeline.jsonl")
    log.write(span("compute", step, step + 0.5, step=step, rank=rank) for step in (1, 2, 3) for rank in (0, 1))
    log.write(span("compute", 10, 11, step=2, rank=rank) for rank in (0, 1))
    log.close()
    found = [(each.rank, each.step, each.start) for each in read_timeline(tmp_path / "timeline.jsonl")]
    assert found == [(0, 1, 1), (0, 2, 10), (1, 1, 1), (1, 2, 10)]


def test_ranks_that_are_gone_where_a_run_is_resumed_are_not_drawn_beside_the_others(tmp_path: Path) -> None:
    log = JsonLog(tmp_path / "timeline.jsonl")
    log.write(span("compute", step, step + 0.5, step=step, rank=rank) for rank in (0, 1, 2) for step in (1, 2, 3))
    log.write(span("compute", 10 + step, 11 + step, step=step, rank=rank) for rank in (0, 1) for step in (2, 3))
    log.close()
    found = {(each.rank, each.step, each.start) for each in read_timeline(tmp_path / "timeline.jsonl")}
    assert found == {(0, 1, 1), (1, 1, 1), (2, 1, 1), *((rank, step, 10 + step) for rank in (0, 1) for step in (2, 3))}


def test_a_run_that_goes_on_at_the_last_step_that_it_recorded_has_that_one_once(tmp_path: Path) -> None:
    """Steps do not go back there, so spans of both attempts were drawn over each other."""
    log = JsonLog(tmp_path / "timeline.jsonl")
    log.write(span("compute", step, step + 0.5, step=step) for step in (3, 4, 5))
    log.write([GoesOn(3)])
    log.write(span("compute", 10 + step, 11 + step, step=step) for step in (5, 6))
    log.write([GoesOn(6)])
    log.close()
    found = [(each.step, each.start) for each in read_timeline(tmp_path / "timeline.jsonl")]
    assert found == [(3, 3), (5, 15), (6, 16)]


def test_what_a_rank_recorded_under_the_number_of_another_takes_nothing_from_that_one(tmp_path: Path) -> None:
    """Who was rank 0 of two generations that ended by failures, and is rank 1 in the third, writes after its rank 0."""
    log = JsonLog(tmp_path / "timeline.jsonl")
    log.write([span("compute", 20, 21, step=20, rank=0)])
    log.write([span("compute", step, step + 1, step=step, rank=0) for step in (3, 9)])
    log.write([span("compute", 20, 21, step=20, rank=1)])
    log.close()
    assert {(each.rank, each.step) for each in read_timeline(tmp_path / "timeline.jsonl")} == {
        (0, 3), (0, 9), (0, 20), (1, 20),
    }  # fmt: skip


def test_overlap_by_hand() -> None:
    """Rank 0: compute [0, 4] and [4, 6], comm [3, 5] and [5, 8]: 5 s of comm, of which [6, 8] is exposed.
    Rank 1: compute [0, 2] twice (two streams), comm [1, 2]: nothing is exposed.
    """
    spans = [
        span("compute", 0, 4),
        span("compute", 4, 6),
        span("comm", 3, 5, bytes=10),
        span("comm", 5, 8, bytes=30),
        span("compute", 0, 2, rank=1),
        span("compute", 0, 2, rank=1),
        span("comm", 1, 2, rank=1, bytes=20),
    ]
    result = overlap(spans)
    assert (result.ranks, result.seconds, result.compute, result.comm, result.exposed) == (2, 8, 4, 3, 1)
    assert result.bytes == 30


def test_the_chrome_trace_has_a_process_a_rank_and_a_thread_a_lane() -> None:
    trace = to_chrome_trace(
        [span("compute", 5.0, 5.25, name="forward"), span("comm", 5.5, 6.0, rank=1, name="chunk", bytes=8)]
    )
    events = json.loads(json.dumps(trace))["traceEvents"]
    names = {(event["pid"], event["tid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    lanes = ("compute", "comm", "wait", "queue", "stage")
    assert names == {(rank, thread, lane) for rank in (0, 1) for thread, lane in enumerate(lanes)}
    complete = [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"]
    assert complete == [
        ("forward", 0, 0, 0, 250_000, {"step": 1, "bytes": 0, "phase": "compute"}),
        ("chunk", 1, 1, 500_000, 500_000, {"step": 1, "bytes": 8, "phase": "compute"}),
    ]
    assert to_chrome_trace([])["traceEvents"] == []
