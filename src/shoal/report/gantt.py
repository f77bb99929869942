"""A step of a pipeline: when each rank ran which action, as measured and as simulated with the measured costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes

from shoal import units
from shoal.errors import UserError
from shoal.pipeline import Action, Costs, Kind, Schedule, check, simulate
from shoal.pipeline.files import action_of

from .drawing import BARS, PAPER, RULE, WIDE, Chart, draw_chart, write_names
from .timeline import Span

LANE = "stage"
COLOURS = {"forward": BARS[0], "backward, or its input half": BARS[1], "weights' half": BARS[2]}
_OF = {"F": BARS[0], "B": BARS[1], "I": BARS[1], "W": BARS[2]}

Row = Sequence[tuple[Action, float, float]]
"""The actions of a rank: action, start and stop in seconds since the step's first action."""


@dataclass(frozen=True)
class Gantt:
    """The charts of one step.

    measured, predicted: charts of the recorded and of the simulated step; no prediction for a schedule without a flush,
        whose steps overlap.
    waited, expected: share of the ranks' time that they waited between the first and last action, in each of them.
    """

    step: int
    measured: Chart
    waited: float
    predicted: Chart | None
    expected: float | None


def gantt(spans: Sequence[Span]) -> Gantt | None:
    """Makes the Gantt charts of the spans of one step; None without stages. Shows the first rank of each stage."""
    rows = _rows([span for span in spans if span.lane == LANE])
    if not rows:
        return None
    step, schedule = spans[0].step, _schedule(rows)
    whole = max(stop for row in rows for _, _, stop in row)
    predicted = None
    try:
        check(schedule)
        predicted = simulate(schedule, _costs(rows))
    except UserError:  # without a flush, other actions of this schedule are in other steps
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
    """Returns the actions of each rank along pp."""
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
    """Returns the median time of each kind of action of each stage."""
    taken: dict[tuple[Kind, int], list[float]] = {}
    for row in rows:
        for action, start, stop in row:
            taken.setdefault((action.kind, action.stage), []).append(stop - start)
    return Costs({key: statistics.median(seconds) for key, seconds in taken.items()})


def _chart(title: str, rows: Sequence[Row], longest: float) -> Chart:
    label = f"{title}: {len(rows)} ranks of a pipeline over {units.duration(longest)}"
    return draw_chart(
        title, label, partial(_draw, rows, longest), height=40 + 30 * len(rows), wide=WIDE, first_tick="{:g} ms"
    )


def _draw(rows: Sequence[Row], longest: float, axes: Axes) -> None:
    for index, row in enumerate(rows):
        extents = [(1e3 * start, 1e3 * (stop - start)) for _, start, stop in row]
        faces = [_OF[action.kind] for action, _, _ in row]
        axes.broken_barh(extents, (index - 0.4, 0.8), facecolors=faces, edgecolor=PAPER, linewidth=0.7)
    axes.set_yticks(range(len(rows)), [f"place {place}" for place in range(len(rows))])
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(0, 1e3 * longest)
    axes.grid(False, axis="y")
    axes.grid(True, axis="x", color=RULE, linewidth=0.8)
    names = (
        (1e3 * start, 1e3 * stop, index, str(action.microbatch))
        for index, row in enumerate(rows)
        for action, start, stop in row
    )
    write_names(axes, names)
