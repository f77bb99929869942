"""The computation and communication of each rank over time, in a few recorded steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ..comm.wire import sent
from .jsonl import read_standing
from .levels import MemoryTrace, counter_events

LANES = ("compute", "comm")
"""Lanes of work, shown on the page."""

TRACE_LANES = (*LANES, "wait", "queue", "stage")
"""Lanes of the trace: also the trainer's waits for communication, work in the queue of a lane (overlapping spans), and
the actions of a pipeline's schedule."""


@sent
@dataclass(frozen=True, kw_only=True)
class Span:
    """One piece of work of a rank.

    start: Unix time in seconds, comparable between ranks.
    bytes: payload of a collective, 0 for compute.
    phase: "compute", or of communication "transfer", "encode", "decode", "queue" or "wait".
    """

    step: int
    rank: int
    lane: Literal["compute", "comm", "wait", "queue", "stage"]
    name: str
    start: float
    seconds: float
    bytes: int = 0
    phase: str = "compute"

    @property
    def stop(self) -> float:
        return self.start + self.seconds


def read_timeline(path: Path | str) -> list[Span]:
    """Reads the spans in `path`, rank by rank in the order in which they were written; none when there is no such file.

    Incomplete lines and lines of another form are left out, and spans of steps that were trained again. Also where the
    steps of a rank go back as time goes on its run was resumed, and earlier spans from that step on are dropped, of all
    ranks: there may be fewer of them now.
    """
    names = {field.name for field in fields(Span)}
    kept: dict[int, list[Span]] = {}
    for line in read_standing(Path(path)):
        if set(line) | {"phase"} != names or line["lane"] not in TRACE_LANES:
            continue
        span = Span(**line)
        of_rank = kept.setdefault(span.rank, [])
        if of_rank and span.step < of_rank[-1].step and span.start > of_rank[-1].start:
            for before in kept.values():
                before[:] = [each for each in before if each.step < span.step or each.start > span.start]
        of_rank.append(span)
    return [span for of_rank in kept.values() for span in of_rank]


@dataclass(frozen=True)
class StepOverlap:
    """The overlap of communication and computation in one step.

    seconds: from the first span to the last.
    compute, comm: seconds of each lane, means over ranks.
    exposed: seconds of communication without computation beside it, mean over ranks.
    bytes: bytes of communication, mean over ranks.
    """

    step: int
    ranks: int
    seconds: float
    compute: float
    comm: float
    exposed: float
    bytes: float


def overlap(spans: Sequence[Span]) -> StepOverlap:
    """Measures how much communication of one step is hidden behind computation. `spans`: of that step, at least one."""
    spans = [span for span in spans if span.lane in LANES]
    ranks = sorted({span.rank for span in spans})
    compute = comm = both = 0.0
    for rank in ranks:
        computing = _union([span for span in spans if span.rank == rank and span.lane == "compute"])
        sending = _union([span for span in spans if span.rank == rank and span.lane == "comm"])
        compute += _length(computing)
        comm += _length(sending)
        both += sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in computing for b in sending)
    return StepOverlap(
        step=spans[0].step,
        ranks=len(ranks),
        seconds=max(span.stop for span in spans) - min(span.start for span in spans),
        compute=compute / len(ranks),
        comm=comm / len(ranks),
        exposed=(comm - both) / len(ranks),
        bytes=sum(span.bytes for span in spans) / len(ranks),
    )


def stalls(spans: Sequence[Span]) -> dict[str, float]:
    """Returns the seconds that ranks waited in the step of `spans`, by cause: means over ranks, longest first."""
    ranks = {span.rank for span in spans}
    waits: dict[str, float] = {}
    for span in spans:
        if span.lane == "wait":
            waits[span.name] = waits.get(span.name, 0.0) + span.seconds / len(ranks)
    return dict(sorted(waits.items(), key=lambda each: -each[1]))


def _union(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Returns the time covered by the spans, as disjoint intervals."""
    merged: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if merged and span.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.stop))
        else:
            merged.append((span.start, span.stop))
    return merged


def _length(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in intervals)


def to_chrome_trace(spans: Sequence[Span], traces: Sequence[MemoryTrace] = ()) -> dict[str, Any]:
    """Returns the JSON object of a trace for chrome://tracing or ui.perfetto.dev: a process for each rank, a thread for
    each lane, a counter for each tier of memory.

    Times are microseconds from the beginning ("Trace Event Format", Google; complete, counter and metadata events).
    """
    origin = min([span.start for span in spans] + [trace.at[0] for trace in traces], default=0.0)
    labels: list[dict[str, Any]] = []
    for rank in sorted({span.rank for span in spans}):
        labels.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for thread, lane in enumerate(TRACE_LANES):
            labels.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": lane}})
    events = [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.lane,
            "pid": span.rank,
            "tid": TRACE_LANES.index(span.lane),
            "ts": (span.start - origin) * 1e6,
            "dur": span.seconds * 1e6,
            "args": {"step": span.step, "bytes": span.bytes, "phase": span.phase},
        }
        for span in spans
    ]
    return {"traceEvents": labels + events + counter_events(traces, origin), "displayTimeUnit": "ms"}
