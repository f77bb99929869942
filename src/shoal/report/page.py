"""The report of a run: one self-contained HTML file, which can be made at any moment of the run."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

import shoal
from shoal import units
from shoal.replace import replace_text

from . import figures
from .drawing import COLOURS, WAIT, Chart
from .evaluations import with_evaluations
from .federated import federation
from .gantt import COLOURS as STAGE_COLOURS
from .gantt import LANE, gantt
from .levels import MemoryTrace, read_memory_traces
from .memory_figure import Peak, colour, in_order, memory_chart, peaks
from .metrics import RunRecords, read_metrics
from .norms_table import layer_norms
from .result import summarize
from .timeline import LANES, Span, overlap, read_timeline, stalls, to_chrome_trace
from .timeline_figure import WORDS, bar_colours, timeline_chart

TIMELINE_STEPS = 3
SAMPLES = 6


def write_report(run_dir: Path | str) -> Path:
    """Writes `run_dir`/report.html from metrics.jsonl, evaluations.jsonl, timeline.jsonl and memory.jsonl, and returns
    its path. The last two also become trace.json, for chrome://tracing and Perfetto.

    The run may be empty, running, killed or finished. Raises UserError when the directory has no metrics.jsonl.
    """
    run_dir = Path(run_dir)
    records = with_evaluations(read_metrics(run_dir / "metrics.jsonl"), run_dir)
    spans = read_timeline(run_dir / "timeline.jsonl")
    traces = read_memory_traces(run_dir / "memory.jsonl")
    if spans:
        replace_text(run_dir / "trace.json", json.dumps(to_chrome_trace(spans, traces)))
    page = render(run_dir.resolve().name, records, spans, traces)
    # a text by a model may end within a character, which UTF-8 cannot encode
    return replace_text(run_dir / "report.html", page, errors="replace")


def render(name: str, records: RunRecords, spans: Sequence[Span], traces: Sequence[MemoryTrace]) -> str:
    """Returns the page's HTML. Everything from the run is escaped, except our own SVG."""
    loader = PackageLoader("shoal.report", package_path="")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {each.__name__: each for each in (units.count, units.size, units.flops_rate, units.duration)}
    environment.filters["utc"] = _utc
    script = files("shoal.report").joinpath("page.js").read_text(encoding="utf-8")
    stages = _last_recorded([span for span in spans if span.lane == LANE])
    recorded = _last_recorded([span for span in spans if span.lane in (*LANES, "wait")])
    return environment.get_template("page.html").render(
        name=name,
        records=records,
        result=summarize(records),
        status=_status(records),
        charts=_charts(records),
        timelines=[timeline_chart(step) for step in recorded],
        overlaps=[overlap(step) for step in recorded],
        waits=[{WORDS.get(cause, cause): seconds for cause, seconds in stalls(step).items()} for step in recorded],
        legend=_legend([span for step in recorded for span in step]),
        gantts=[found for step in stages[-1:] if (found := gantt(step)) is not None],
        stage_colours=STAGE_COLOURS,
        memory=_memory(traces, spans),
        on_gpu=records.run is not None and not records.run.device.lower().startswith("cpu"),
        moves=records.moves[-1] if records.moves else None,
        norms=layer_norms(records.steps),
        rounds=federation(records.rounds),
        server=records.servers[-1] if records.servers else None,
        samples=records.samples[::-1][:SAMPLES],
        written=datetime.now(UTC).timestamp(),
        version=shoal.__version__,
        script=script,
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
    )


@dataclass(frozen=True)
class _Memory:
    """The memory section: the rank with the highest peak in the last recorded step."""

    trace: MemoryTrace
    legend: dict[str, str]
    charts: list[Chart]
    peaks: list[Peak]


def _memory(traces: Sequence[MemoryTrace], spans: Sequence[Span]) -> _Memory | None:
    if not traces:
        return None
    last = max(trace.step for trace in traces)
    trace = max((trace for trace in traces if trace.step == last), key=lambda trace: trace.most)
    beside = [span for span in spans if (span.step, span.rank) == (trace.step, trace.rank)]
    roles = in_order(list(dict.fromkeys(role for roles in trace.levels.values() for role in roles)))
    return _Memory(
        trace,
        {role: COLOURS[colour(role)] for role in roles},
        [memory_chart(trace, tier, beside) for tier in trace.levels],
        peaks(trace, beside),
    )


def _status(records: RunRecords) -> dict[str, str]:
    """Returns the state of the run: a word, and a sentence."""
    if records.end is not None:
        word, text = "ended", f"{records.end.reason.rstrip('.')}, after {units.duration(records.end.seconds)}."
    elif not records.steps:
        word, text = "no steps yet", "There are no steps yet."
    else:
        last = records.steps[-1]
        word, text = "not ended", f"Still running, or killed: its last step, {last.step}, ended at {_utc(last.time)}."
    return {"word": word, "text": text}


def _charts(records: RunRecords) -> list[Chart]:
    """Draws the loss, then the other quantities that were recorded."""
    steps = records.steps
    if not steps:
        return []
    unit, unit_bytes = ("GiB", 2**30) if max(r.memory_bytes for r in steps) >= 2**30 else ("MiB", 2**20)
    curve = partial(figures.step_chart, steps=steps, marks=records.marks)
    curves = [
        curve("Throughput, tokens/s", value=lambda r: r.tokens_per_second, show=units.count),
        curve("Learning rate", value=lambda r: r.lr, show="{:.2g}".format),
        curve("Gradient norm", value=lambda r: r.grad_norm, show="{:.3g}".format),
        curve("Loss scale", value=lambda r: r.loss_scale, show="{:g}".format),
        curve("Busiest expert, times the mean", value=lambda r: r.imbalance, show="{:.2f}".format),
        curve("Dropped by experts, %", value=lambda r: r.dropped and 100 * r.dropped, show="{:.1f}".format),
        curve(f"Memory of rank 0, {unit}", value=lambda r: r.memory_bytes / unit_bytes, show="{:.3g}".format),
    ]
    return [figures.loss_chart(steps, records.evals, records.marks), *(chart for chart in curves if chart is not None)]


def _last_recorded(spans: Sequence[Span]) -> list[list[Span]]:
    """Returns the spans of the last few recorded steps, a list for each step."""
    steps = sorted({span.step for span in spans})[-TIMELINE_STEPS:]
    return [[span for span in spans if span.step == step] for step in steps]


def _legend(spans: Sequence[Span]) -> dict[str, str]:
    """Returns the legend of a timeline: colours by name."""
    waits = {"waiting": WAIT} if any(span.lane == "wait" for span in spans) else {}
    named = {WORDS.get(name, name): colour for name, colour in bar_colours(spans).items()}
    return {name: COLOURS[colour] for name, colour in (named | waits).items()}


def _utc(seconds: float) -> Any:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
