from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest

from shoal.errors import UserError
from shoal.report import figures, timeline_figure
from shoal.report.jsonl import JsonLog
from shoal.report.metrics import EndRecord, MetricsLog, SampleRecord, WarningRecord
from shoal.report.page import write_report
from shoal.report.timeline import Span
from tests.report.synthetic import run_record, step_record, step_spans, write_run


class Balance(HTMLParser):
    """Fails on a tag that is closed out of order, and keeps all tags and addresses."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href", "action")]
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Balance:
    path = write_report(write_run(tmp_path_factory.mktemp("run"), steps=400))
    return Balance(path.read_text(encoding="utf-8"))


def test_the_page_says_what_came_out(page: Balance) -> None:
    text = " ".join(page.text.split())
    for expected in (
        "5.551 → 1.992",
        "validation loss, -3.559",
        "1.64M",
        "All 400 steps are done, after 52.3 s.",
        "1 warning",
        "train.global_batch 16 file",
        "plan.dp 2 planner",
        "2.13.0+cpu",
        "190 GFLOP/s",
        "checkpoints/step-00000400",
        "Throughput, tokens/s",
        "Learning rate",
        "Gradient norm",
        "Memory of rank 0, MiB",
        "Step 12",
        "rank 1 compute",
    ):
        assert expected in text


def test_the_page_asks_for_nothing_else(page: Balance, tmp_path: Path) -> None:
    html = write_report(write_run(tmp_path, steps=3)).read_text()
    assert all(address.startswith("#") for address in page.addresses)
    assert not {"link", "img", "iframe"} & set(page.tags)
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    allowed = b64encode(sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'" in html
    assert not re.search(r"fetch|XMLHttpRequest|import|eval|innerHTML", script)
    assert "://" not in html
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)


def test_what_a_model_writes_is_text_and_not_html(page: Balance) -> None:
    assert '<script>alert("not run")</script>' in page.text
    assert page.tags.count("script") == 1, "the page's own"


def test_ids_in_the_page_are_unique(tmp_path: Path) -> None:
    html = write_report(write_run(tmp_path, steps=20)).read_text()
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#(\w+)\)", html)) <= set(ids)


def test_a_run_that_was_killed_in_the_middle_of_a_line(tmp_path: Path) -> None:
    write_run(tmp_path, steps=20, ended=False)
    for name in ("metrics.jsonl", "timeline.jsonl"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-9])
    text = Balance(write_report(tmp_path).read_text()).text
    assert "Still running, or killed: its last step, 20, ended at 2027-01-15 08:00:02 UTC." in text


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_without_steps_says_so(begun: bool, tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    if begun:
        log.write(run_record())
    log.close()
    page = Balance(write_report(tmp_path).read_text())
    assert "There are no steps yet." in page.text
    assert "svg" not in page.tags
    assert ("train.global_batch" in page.text) == begun


def test_a_run_that_failed_before_its_first_step_says_why(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(run_record())
    log.write(WarningRecord(message="<b>odd</b>"))
    log.write(EndRecord(reason="The loss is NaN at step 1", seconds=1.0))
    log.close()
    page = Balance(write_report(tmp_path).read_text())
    assert "The loss is NaN at step 1, after 1.0 s." in page.text
    assert "<b>odd</b>" in page.text


def test_a_loss_that_leaves_the_numbers_is_drawn_around(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 5):
        log.write(replace(step_record(step), loss=math.nan if step > 2 else 3.0, grad_norm=math.inf, mfu=None))
    log.write(SampleRecord(step=4, prompt="", text="\x00\ud800"))
    log.close()
    assert "3.000 → nan" in " ".join(Balance(write_report(tmp_path).read_text()).text.split())


def test_norms_by_layer_are_a_table_with_a_row_a_layer(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    norms = {
        4: {"embed": 1.0, "blocks.0": 8.0},
        8: {"embed": 2.0, "blocks.0": 9.0},
        12: {"embed": math.inf, "blocks.0": 3.5},
    }
    for step in range(1, 13):
        log.write(replace(step_record(step), norms=norms.get(step)))
    log.close()
    text = " ".join(Balance(write_report(tmp_path).read_text(encoding="utf-8")).text.split())
    assert "Norm before clipping Step 4 Largest Step 12 embed 1 inf inf blocks.0 8 9 3.5" in text


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the directory of a run"):
        write_report(tmp_path)


def test_drawing_leaves_the_settings_of_matplotlib_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    write_report(write_run(tmp_path, steps=3))
    assert dict(matplotlib.rcParams) == before


def test_a_long_run_is_thinned_and_keeps_its_spikes() -> None:
    x = list(range(100_000))
    y = [math.sin(i / 5000) for i in x]
    y[77_777], y[33_333], y[33_300] = 9.0, -9.0, math.nan
    thin_x, thin_y = figures.thin([float(i) for i in x], y)
    assert len(thin_x) == len(thin_y) <= figures.MAX_POINTS
    assert (77_777.0, 9.0) in zip(thin_x, thin_y, strict=True)
    assert (33_333.0, -9.0) in zip(thin_x, thin_y, strict=True)
    assert list(thin_x) == sorted(thin_x)
    assert figures.thin([1.0, 2.0], [3.0, 4.0]) == ([1.0, 2.0], [3.0, 4.0])


def test_smoothing_does_not_shift_a_straight_line() -> None:
    line = [float(i) for i in range(400)]
    assert figures.smooth(line) == pytest.approx(line)
    noisy = [1.0 if i % 2 else -1.0 for i in range(400)]
    assert max(map(abs, figures.smooth(noisy)[10:-10])) < 0.12
    falling = [5.0 - i / 100 + (0.3 if i % 2 else -0.3) for i in range(400)]
    falling[-1] -= 2.0
    for curve in (figures.smooth(falling), [*reversed(figures.smooth(falling[::-1]))]):
        away = [abs(value - (5.0 - i / 100)) for i, value in enumerate(curve)]
        assert max(away) < 0.75, "the last value alone does not decide where the curve ends"
        assert abs(curve[-1] - curve[-2]) < 0.2, "nor does the curve fall off there"
    gap = figures.smooth([1.0, math.nan, 3.0])
    assert gap[0] == 1.0 and math.isnan(gap[1]) and gap[2] == 3.0


def test_a_timeline_of_many_ranks_and_spans_stays_small() -> None:
    chart = timeline_figure.timeline_chart(step_spans(1, ranks=64, microbatches=40, chunks=60))
    assert len(chart.svg) < 600_000
    assert f"{timeline_figure.MAX_RANKS} ranks" in chart.label


@pytest.mark.parametrize(
    "name, family",
    [("chunk 3", "chunk"), ("forward_12", "forward"), ("all_reduce[2]", "all_reduce"), ("7", "7"), ("p2p", "p2p")],
)
def test_the_family_of_a_span(name: str, family: str) -> None:
    assert timeline_figure.family(name) == family


def test_compute_and_communication_never_share_a_colour() -> None:
    names = {
        "comm": ["gradients 0", "ballot", "stop?", "reduce", "gather"],
        "compute": ["load", "forward", "backward", "optimizer", "data", "more"],
    }
    spans = [
        Span(step=1, rank=0, lane=lane, name=name, start=start, seconds=1.0)  # type: ignore[arg-type]
        for lane, several in names.items()
        for start, name in enumerate(several)
    ]
    colours = timeline_figure.bar_colours(spans)
    assert not {colours[timeline_figure.family(name)] for name in names["comm"]} & {
        colours[name] for name in names["compute"]
    }
    known = ["gradients", "ballot", "stop?", "load", "forward", "backward", "optimizer"]
    assert len({colours[name] for name in known}) == len(known), "what every run has is told apart"
    later = [replace(span, start=-span.start) for span in spans]
    assert {name: timeline_figure.bar_colours(later)[name] for name in known} == {name: colours[name] for name in known}


def test_the_timeline_speaks_plainly_and_shows_what_is_short(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    log = JsonLog(tmp_path / "timeline.jsonl")
    for rank, seconds in ((0, 0.9), (1, 1e-6)):
        log.write(
            [
                Span(step=9, rank=rank, lane="compute", name="forward", start=0.0, seconds=1.0),
                Span(
                    step=9,
                    rank=rank,
                    lane="comm",
                    name="gradients 3",
                    start=1.0 - seconds,
                    seconds=seconds,
                    bytes=2**20,
                ),
                Span(step=9, rank=rank, lane="comm", name="ballot", start=0.0, seconds=seconds),
                Span(step=9, rank=rank, lane="comm", name="stop?", start=0.0, seconds=seconds),
            ]
        )
    log.close()
    html = write_report(tmp_path).read_text()
    page = Balance(html)
    for words in (
        "exchange of gradients",
        "agreement on the step",
        "whether to stop after the step",
        "Data of a rank",
        "1.00 MiB",
    ):
        assert words in page.text
    assert not re.search(
        r"\bballot\b|stop\?", page.text.partition("Configuration")[0].partition("Compute and communication")[2]
    )
    assert "exchange of gradients 3, rank 1: 0.001 ms, 1.00 MiB" in unescape(html), "what is under the pointer"
    boxes = [json.loads(unescape(found)) for found in re.findall(r'data-box="([^"]*)"', html)]
    assert all(box["left"] < box["right"] and box["top"] < box["bottom"] for box in boxes)
    bars = [
        Span(step=1, rank=0, lane="comm", name=name, start=at, seconds=length)
        for name, at, length in (("x", 0, 1), ("y", 0.5, 1e-9))
    ]
    corners = re.findall(
        r'd="((?:[ML] .*\n)+)z\n"[^>]*fill: var\(--bar-comm', timeline_figure.timeline_chart(bars).svg
    )[1]
    left, right = (pick(float(x) for x in re.findall(r"[ML] (\S+)", corners)) for pick in (min, max))
    assert right - left >= 1, "a bar of a nanosecond is seen beside one of a second"


def test_numbers_go_with_the_curves(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 5):
        log.write(replace(step_record(step), loss=math.nan if step == 3 else step / 3))
    log.close()
    html = write_report(tmp_path).read_text()
    series = [json.loads(unescape(found)) for found in re.findall(r'data-series="([^"]*)"', html)]
    assert series[0][0] | {"colour": ""} == {
        "name": "training", "colour": "", "width": 1.0, "x": [1, 2, 3, 4], "y": [0.333333, 0.666667, None, 1.33333],
    }  # fmt: skip
    assert [each[0]["name"] for each in series[1:]] == [
        "Throughput, tokens/s",
        "Learning rate",
        "Gradient norm",
        "Memory of rank 0, MiB",
    ]


def test_where_a_run_was_taken_up_again_is_marked(tmp_path: Path) -> None:
    write_run(tmp_path, steps=20)
    assert 'data-marks="[]"' in (before := write_report(tmp_path).read_text())
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for first in (19, 15):
        log.write(run_record())
        for step in range(first, first + 5):
            log.write(step_record(step))
    log.close()
    html = write_report(tmp_path).read_text()
    assert "taken up again: after step 14." in " ".join(Balance(html).text.split()), (
        "the attempt from 18 on was given up"
    )
    assert 'data-marks="[14]"' in html and ">resumed</text>" in html
    assert html.count("stroke-dasharray: 4") - before.count("stroke-dasharray: 4") == 6, (
        "on each curve; the first one is drawn twice"
    )
