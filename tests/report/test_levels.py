"""Memory over a step: the trace keeps peaks, the page draws it, Perfetto gets it as counters."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from shoal.report.jsonl import JsonLog
from shoal.report.levels import MOMENTS, MemoryTrace, memory_trace, read_memory_traces
from shoal.report.memory_figure import in_order, memory_chart, peaks
from shoal.report.metrics import MetricsLog, MovesRecord
from shoal.report.page import write_report
from shoal.report.timeline import Span, stalls
from tests.report.synthetic import BEGAN, SECONDS_PER_STEP, step_spans, write_run
from tests.report.test_page import Balance

MIB = 2**20
BEGIN = BEGAN + 12 * SECONDS_PER_STEP * 1.1


def changes(number: int) -> list[tuple[float, str, str, int]]:
    """Weights of the host stay; the device's come, and grow and shrink by chance."""
    chance = random.Random(0)
    found = [(BEGIN, "host", "weights", 40 * MIB), (BEGIN, "host", "masters", 0)]
    for i in range(number):
        role = chance.choice(["weights in use", "activations"])
        found.append((BEGIN + 0.1 * i / number, "device", role, chance.randrange(30) * MIB))
    return found


@pytest.fixture
def trace() -> MemoryTrace:
    made = memory_trace(12, 1, changes(200), {"device": 60 * MIB}, counts_all=True)
    assert made is not None
    return made


def test_a_trace_by_hand() -> None:
    made = memory_trace(
        3,
        0,
        [(1.0, "host", "weights", 5), (1.0, "device", "weights in use", 0), (2.0, "device", "weights in use", 7),
         (2.5, "device", "activations", 1), (3.0, "device", "weights in use", 0), (1.0, "host", "masters", 0)],
        {"device": 9, "disk": 1},
        counts_all=True,
    )  # fmt: skip
    assert made is not None
    assert made.at == [1.0, 2.0, 2.5, 3.0]
    assert made.levels == {
        "device": {"weights in use": [0, 7, 7, 0], "activations": [0, 0, 1, 1]},
        "host": {"weights": [5, 5, 5, 5]},
    }
    assert next(iter(made.levels)) == "device" and made.budgets == {"device": 9}
    assert made.total("device") == [0, 7, 8, 1] and made.most == 8
    assert memory_trace(3, 0, [(1.0, "host", "weights", 0)], {}, counts_all=True) is None


def test_a_long_trace_is_thinned_and_keeps_every_peak() -> None:
    many = changes(20_000)
    many[7_777] = (many[7_777][0], "device", "gradients on loan", 1000)
    many[7_778] = (many[7_778][0], "device", "gradients on loan", 0)
    made = memory_trace(1, 0, many, {}, counts_all=True)
    assert made is not None and 20 < len(made.at) <= MOMENTS
    held, most = {"weights in use": 0, "activations": 0, "gradients on loan": 0}, 0
    for _, tier, role, size in many:
        if tier == "device":
            held[role] = size
            most = max(most, sum(held.values()))
    assert made.most == most
    assert {role: max(sizes) for role, sizes in made.levels["device"].items()} == {
        "weights in use": 29 * MIB,
        "activations": 29 * MIB,
        "gradients on loan": 1000,
    }
    assert made.at == sorted(made.at)


def test_what_is_written_is_read_again(trace: MemoryTrace, tmp_path: Path) -> None:
    assert read_memory_traces(tmp_path / "none") == []
    path = tmp_path / "memory.jsonl"
    log = JsonLog(path)
    log.write([trace])
    log.write([trace])
    log.close()
    with path.open("a") as file:
        file.write('{"step": 1}\n')
    assert read_memory_traces(path) == [trace]
    assert path.stat().st_size < 20_000


def test_roles_are_stacked_from_what_stays_to_what_moves() -> None:
    assert in_order(["all else", "activations", "weights in use", "weights"]) == [
        "weights",
        "weights in use",
        "activations",
        "all else",
    ]


def test_peaks_say_in_which_phase(trace: MemoryTrace) -> None:
    spans = [Span(step=12, rank=1, lane="compute", name="forward", start=BEGIN, seconds=0.2)]
    table = {peak.role: peak for peak in peaks(trace, spans)}
    assert table["weights"].when == "always" and table["weights"].nbytes == 40 * MIB
    assert table["activations"].nbytes == max(trace.levels["device"]["activations"])
    assert table["activations"].when.startswith("forward, at ")


def test_the_picture_says_the_budget_if_it_is_near(trace: MemoryTrace) -> None:
    near = memory_chart(trace, "device", step_spans(12))
    assert "budget 60.0 MiB" in near.svg and "of 60.0 MiB" in near.title
    far = memory_chart(MemoryTrace(**{**vars(trace), "budgets": {"device": 600 * MIB}}), "device", [])
    assert "budget" not in far.svg and "of 600 MiB" in far.title
    assert len(near.svg) < 150_000
    heights = {areas.count("var(--role-8)") for areas in (near.svg, memory_chart(trace, "host", []).svg)}
    assert heights == {0, 1}, "activations are drawn where they are"


def page_of(run_dir: Path) -> str:
    return " ".join(Balance(write_report(run_dir).read_text(encoding="utf-8")).text.split())


def test_the_page_and_the_trace_have_it_all(trace: MemoryTrace, tmp_path: Path) -> None:
    write_run(tmp_path, steps=12)
    log = JsonLog(tmp_path / "memory.jsonl")
    emptier = MemoryTrace(**{**vars(trace), "rank": 0, "levels": {"device": {"activations": [MIB] * len(trace.at)}}})
    log.write([emptier, trace])
    log.close()
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    planned = {"weights to the device": 5 * MIB, "gradients home": None}
    moved = {"weights to the device": 5 * MIB + 17, "gradients home": 3}
    metrics.write(MovesRecord(step=12, planned=planned, moved=moved, otherwise={"each goes after its use": 9 * MIB}))
    metrics.close()
    text = page_of(tmp_path)
    assert "Step 12 of rank 1, the one that held most." in text and "activations are not counted" not in text
    for expected in (
        "device weights in use 29.0 MiB",
        "host weights 40.0 MiB always",
        "weights to the device 5.00 MiB 5.00 MiB 17",
        "gradients home no plan 3 B",
        "weights, if each goes after its use 9.00 MiB",
    ):
        assert expected in text
    events = [each for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if each["ph"] == "C"]
    mine = [each for each in events if each["pid"] == 1 and each["name"] == "device memory"]
    assert len(mine) > 100 and max(sum(each["args"].values()) for each in mine) == trace.most
    assert mine[-1]["args"] == {role: sizes[-1] for role, sizes in trace.levels["device"].items()}
    assert len([each for each in events if each["pid"] == 1 and each["name"] == "host memory"]) == 1, "it stays"
    assert all(each["ts"] >= 0 for each in events)


def test_a_run_without_these_records_has_its_report(tmp_path: Path) -> None:
    text = page_of(write_run(tmp_path, steps=12))
    assert "Compute and communication" in text
    assert not re.search(r"Bytes moved|that held most|For what", text)


def test_waits_are_summed_by_cause() -> None:
    def wait(rank: int, name: str, seconds: float) -> Span:
        return Span(step=1, rank=rank, lane="wait", name=name, start=BEGIN, seconds=seconds, phase="wait")

    spans = [
        *step_spans(1),
        wait(0, "disk", 1.0),
        wait(1, "disk", 2.0),
        wait(1, "weights", 4.0),
        wait(1, "weights", 4.0),
    ]
    assert stalls(spans) == {"weights": 4.0, "disk": 1.5}
    assert list(stalls(spans)) == ["weights", "disk"]
