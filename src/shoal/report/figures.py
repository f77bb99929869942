"""The page's curves over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import linear_regression
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from .drawing import FAINT, FIRST, MUTED, NARROW, PAPER, SECOND, WIDE, Chart, Series, draw_chart
from .metrics import EvalRecord, StepRecord

MAX_POINTS = 2000
EMPTY: Mapping[int, str] = {}


def loss_chart(steps: Sequence[StepRecord], evals: Sequence[EvalRecord], marks: Mapping[int, str] = EMPTY) -> Chart:
    """Draws the training loss (faint), the smoothed training loss (strong) and the validation losses.

    marks: the steps after which the run was resumed or its plan changed, with a word.
    """
    train = ([float(r.step) for r in steps], [r.loss for r in steps])
    smoothed = (train[0], smooth(train[1]))
    validation = ([float(r.step) for r in evals], [r.loss for r in evals])

    def draw(axes: Axes) -> None:
        axes.plot(*thin(*train), color=FAINT, linewidth=1)
        axes.plot(*thin(*smoothed), color=FIRST, linewidth=2, solid_capstyle="round")
        axes.plot(*validation, color=SECOND, linewidth=1.5, marker="o", markersize=6, markeredgecolor=PAPER)
        ends = [("training", FIRST, smoothed)] + ([("validation", SECOND, validation)] if evals else [])
        _label_ends(axes, ends, "{:.3f}")
        _mark(axes, marks, named=True)

    first, last = (f"{record.loss:.3f} at step {record.step}" for record in (steps[0], steps[-1]))
    label = f"Training loss from {first} to {last}"
    chart = draw_chart("Loss", label, draw, height=300, wide=WIDE)
    curves = ("training", FAINT, 1.0, thin(*train)), ("training, smoothed", FIRST, 2.0, thin(*smoothed))
    return chart.with_series(*curves, ("validation", SECOND, 1.5, validation))


def _mark(axes: Axes, marks: Mapping[int, str], named: bool = False) -> None:
    """Draws a dashed line at each step of `marks`; if `named` with its word at the first of them."""
    first = {text: step for step, text in reversed(list(marks.items()))}
    for step, text in marks.items():
        axes.axvline(step, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        if named and first[text] == step:
            at: dict[str, Any] = {"xytext": (4, -4), "textcoords": "offset points", "va": "top", "size": 11}
            axes.annotate(text, (step, 1), xycoords=("data", "axes fraction"), color=MUTED, **at)


def step_chart(
    title: str,
    steps: Sequence[StepRecord],
    value: Callable[[StepRecord], float | None],
    show: Callable[[float], str],
    marks: Mapping[int, str] = EMPTY,
) -> Chart | None:
    """Draws one quantity over the steps, with its last value at the end of the line; None when no step has it.

    value: returns the quantity of a step, None where it is unknown.
    show: formats a value.
    marks: the steps after which the run was resumed or its plan changed, with a word.
    """
    points = [(float(record.step), y) for record in steps if (y := value(record)) is not None]
    if not points:
        return None
    curve = [x for x, _ in points], [y for _, y in points]

    def draw(axes: Axes) -> None:
        axes.plot(*thin(*curve), color=FIRST, linewidth=1.5, solid_capstyle="round")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: show(y)))
        finite = [y for y in curve[1] if math.isfinite(y)]
        if finite and min(finite) >= 0:
            axes.set_ylim(0, 1.12 * max(finite) or 1)
        _label_ends(axes, [(None, FIRST, curve)], show)
        _mark(axes, marks)

    chart = draw_chart(title, f"{title}: {show(curve[1][-1])} at step {steps[-1].step}", draw, height=190, wide=NARROW)
    return chart.with_series((title, FIRST, 1.5, thin(*curve)))


def smooth(values: Sequence[float]) -> list[float]:
    """Returns moving averages over about a fortieth of the run, centred on each value.

    Near the ends, where no whole window fits, the values are those of the line fitted through the last whole window, so
    that the noise of the last values does not decide where the curve ends. Values that are not finite are left out.
    """
    finite = [math.isfinite(value) for value in values]
    sums = [0.0, *accumulate(value if ok else 0.0 for value, ok in zip(values, finite, strict=True))]
    counts = [0, *accumulate(finite)]
    reach = len(values) // 80
    means = []
    for i, ok in enumerate(finite):
        first, stop = max(0, i - reach), min(len(values), i + reach + 1)
        means.append((sums[stop] - sums[first]) / (counts[stop] - counts[first]) if ok else math.nan)
    if reach:
        for end, first in ((range(reach), 0), (range(len(values) - reach, len(values)), len(values) - 2 * reach - 1)):
            window = [(i, values[i]) for i in range(first, first + 2 * reach + 1) if finite[i]]
            if len(window) > 1:
                slope, height = linear_regression(*zip(*window, strict=True))
                for i in end:
                    means[i] = height + slope * i if finite[i] else math.nan
    return means


def thin(x: Sequence[float], y: Sequence[float]) -> Series:
    """Returns at most MAX_POINTS points: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(x) <= MAX_POINTS:
        return x, y
    stretch = math.ceil(len(x) / (MAX_POINTS // 2))
    keep: list[int] = []
    for first in range(0, len(x), stretch):
        indices = range(first, min(first + stretch, len(x)))
        finite = [i for i in indices if math.isfinite(y[i])] or indices
        keep += sorted({min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)})
    return [x[i] for i in keep], [y[i] for i in keep]


def _label_ends(axes: Axes, ends: Sequence[tuple[str | None, str, Series]], show: str | Callable[[float], str]) -> None:
    """Writes the name and the last value beside the end of each curve, without overlaps; texts near the right edge are
    in one column.

    ends: (name or None, colour, points) of each curve.
    show: formats a value, or a format string for it.
    """
    placed = []
    for name, colour, (x, y) in ends:
        last = next((i for i in reversed(range(len(y))) if math.isfinite(y[i])), None)
        if last is not None:
            value = show.format(y[last]) if isinstance(show, str) else show(y[last])
            placed.append((y[last], x[last], colour, f"{name} {value}" if name else value))
    placed.sort()
    low, high = axes.get_ylim()
    gap = 15 / (axes.get_figure().get_figheight() * 72 - 40) * (high - low)  # type: ignore[union-attr]  # text: 15 px
    at = [y for y, *_ in placed]
    for i in range(1, len(at)):
        at[i] = max(at[i], at[i - 1] + gap)
    right = max((x for _, x, *_ in placed), default=0.0)
    beside: dict[str, Any] = {"xytext": (7, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
    for height, (_, end, colour, text) in zip(at, placed, strict=True):
        axes.annotate(text, (right if end > 0.6 * right else end, height), color=colour, **beside)
