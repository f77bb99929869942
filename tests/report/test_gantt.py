"""The pictures of a pipeline's step."""

from __future__ import annotations

import pytest

from shoal.pipeline import Costs, make_schedule, simulate
from shoal.report.gantt import gantt
from shoal.report.metrics import RunRecords
from shoal.report.page import render
from shoal.report.timeline import Span


def spans_of(name: str, ranks: int, microbatches: int, replicas: int = 1, late: float = 0.0) -> list[Span]:
    """What a run records whose actions take 10 ms a third, and begin `late` seconds after they could."""
    schedule = make_schedule(name, ranks, microbatches)
    simulated = simulate(schedule, Costs.even(schedule.stages, *[0.01 / schedule.chunks] * 3, message=late))
    return [
        Span(
            step=3,
            rank=place * replicas + replica,
            lane="stage",
            name=str(action),
            start=100.0 + start,
            seconds=stop - start,
        )
        for place, row in enumerate(simulated.spans)
        for action, start, stop in row
        for replica in range(replicas)
    ]


@pytest.mark.parametrize(
    ("name", "bubble"), [("gpipe", 0.273), ("1f1b", 0.273), ("interleaved", 0.158), ("zb1p", 0.111), ("zbv", 0.059)]
)
def test_what_was_measured_stands_beside_what_the_schedule_says(name, bubble):
    found = gantt(spans_of(name, 4, 8, replicas=2))
    assert found is not None and found.predicted is not None
    assert found.waited == pytest.approx(bubble, abs=1e-3) and found.expected == pytest.approx(found.waited, abs=1e-9)
    assert "4 ranks" in found.measured.label and found.measured.svg.count("<svg") == 1


def test_messages_that_come_late_are_seen():
    found = gantt(spans_of("1f1b", 4, 8, late=0.005))
    assert found is not None and found.expected is not None and found.waited > found.expected + 0.02


def test_a_step_without_a_flush_is_no_whole():
    later = [span for span in spans_of("1f1b", 2, 4) if span.name != "F1:0"]
    found = gantt(later)
    assert found is not None and found.predicted is None and found.expected is None


def test_the_page_has_them_where_there_are_stages():
    spans = spans_of("zbv", 2, 4)
    page = render("run", RunRecords(), spans, [])
    assert "as the schedule says" in page and "The ranks waited" in page
    assert "<h2>Pipeline</h2>" not in render("run", RunRecords(), [], [])
    assert gantt([]) is None
