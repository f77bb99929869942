"""A step of a pipeline: what each rank ran when, and what its schedule says, timed with what the actions took."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes

from shoal.errors import UserError
from shoal.pipeline import Action, Costs, Kind, Schedule, check, simulate
from shoal.pipeline.files import action_of

from . import units
from .figures import BARS, INK, PAPER, RULE, WIDE, Chart, draw_chart
from .timeline import Span

LANE = "stage"
COLOURS = {"forward": BARS[0], "backward, or its input half": BARS[1], "weights' half": BARS[2]}
_OF = {"F": BARS[0], "B": BARS[1], "I": BARS[1], "W": BARS[2]}

Row = Sequence[tuple[Action, float, float]]
"""What a rank ran: action, start and stop in seconds from the step's first one."""


@dataclass(frozen=True)
class Gantt:
    """Of one step: its charts and the share of the ranks' time between first and last action in which they waited. Nothing is predicted of a schedule without a flush, of which a step is no whole."""

    step: int
    measured: Chart
    waited: float
    predicted: Chart | None
    expected: float | None


def gantt(spans: Sequence[Span]) -> Gantt | None:
    """Of the spans of one step; None without stages. Of replicas, and of ranks that share a stage, the first is shown."""
    rows = _rows([span for span in spans if span.lane == LANE])
    if not rows:
        return None
    step, schedule = spans[0].step, _schedule(rows)
    whole = max(stop for row in rows for _, _, stop in row)
    predicted = None
    try:
        check(schedule)
        predicted = simulate(schedule, _costs(rows))
    except UserError:  # of another step the rest of what these actions need
        pass
    longest = max(whole, predicted.seconds if predicted else 0.0)
    return Gantt(
        step,
        _chart(f"Step {step}, measured", rows, longest),
        1 - sum(stop - start for row in rows for _, start, stop in row) / (len(rows) * whole),
        None if predicted is None else _chart(f"Step {step}, as the schedule says", predicted.spans, longest),
        None if predicted is None else predicted.bubble,
    )


def _rows(spans: Sequence[Span]) -> list[Row]:
    """By place in the pipeline."""
    by_rank: dict[int, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        by_rank.setdefault(span.rank, []).append(span)
    origin = min((span.start for span in spans), default=0.0)
    found: dict[frozenset[int], Row] = {}
    for rank in sorted(by_rank):
        row = [(action_of(span.name), span.start - origin, span.stop - origin) for span in by_rank[rank]]
        found.setdefault(frozenset(action.stage for action, _, _ in row), row)
    return [found[stages] for stages in sorted(found, key=min)]


def _schedule(rows: Sequence[Row]) -> Schedule:
    orders = tuple(tuple(action for action, _, _ in row) for row in rows)
    chunks = max(len({action.stage for action in order}) for order in orders)
    microbatches = 1 + max(action.microbatch for order in orders for action in order)
    there_and_back = any(action.stage == 2 * len(rows) - 1 for action in orders[0])
    return Schedule("run", len(rows), chunks, microbatches, orders, "v" if there_and_back else "loop")


def _costs(rows: Sequence[Row]) -> Costs:
    """Medians of what each kind of action of a stage took."""
    taken: dict[tuple[Kind, int], list[float]] = {}
    for row in rows:
        for action, start, stop in row:
            taken.setdefault((action.kind, action.stage), []).append(stop - start)
    return Costs({key: statistics.median(seconds) for key, seconds in taken.items()})


def _chart(title: str, rows: Sequence[Row], longest: float) -> Chart:
    label = f"{title}: {len(rows)} ranks of a pipeline over {units.duration(longest)}"
    return draw_chart(title, label, partial(_draw, rows, longest), height=40 + 30 * len(rows), wide=WIDE, first_tick="{:g} ms")


def _draw(rows: Sequence[Row], longest: float, axes: Axes) -> None:
    for place, row in enumerate(rows):
        extents = [(1e3 * start, 1e3 * (stop - start)) for _, start, stop in row]
        axes.broken_barh(
            extents, (place - 0.4, 0.8), facecolors=[_OF[action.kind] for action, _, _ in row], edgecolor=PAPER, linewidth=0.7
        )
    axes.set_yticks(range(len(rows)), [f"place {place}" for place in range(len(rows))])
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(0, 1e3 * longest)
    axes.grid(False, axis="y")
    axes.grid(True, axis="x", color=RULE, linewidth=0.8)
    axes.figure.canvas.draw()  # the layout, on which the room for names depends
    pixels = axes.bbox.width / axes.figure.dpi * 72 / (longest or 1.0)
    for place, row in enumerate(rows):
        for action, start, stop in row:
            name = str(action.microbatch)
            if (stop - start) * pixels > 6.4 * len(name) + 6:
                axes.text(1e3 * (start + stop) / 2, place, name, ha="center", va="center_baseline", size=11, color=INK)
