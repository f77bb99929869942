"""The page's charts, as inline SVG that takes its colours and its font from the page, so that dark mode and print need no second copy."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import linear_regression
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .metrics import EvalRecord, StepRecord

MAX_POINTS = 2000
WIDE, NARROW = 880.0, 410.0
"""Widths in CSS pixels. A figure is drawn at the width at which it is shown, or its text would shrink on a phone."""

# matplotlib wants colours; each of these is a stand-in that becomes a variable of the page's style sheet.
COLOURS = {
    "#000001": "var(--ink)",
    "#000002": "var(--muted)",
    "#000003": "var(--rule)",
    "#000004": "var(--first)",
    "#000005": "var(--first-faint)",
    "#000006": "var(--second)",
    "#000007": "var(--bar-1)",
    "#000008": "var(--bar-2)",
    "#000009": "var(--bar-3)",
    "#00000a": "var(--bar-comm)",
    "#00000b": "var(--paper)",
    "#00000c": "var(--bar-wait)",
    "#00000d": "var(--bar-4)",
    "#00000e": "var(--bar-comm-2)",
    "#00000f": "var(--bar-comm-3)",
    "#000019": "var(--bar-comm-4)",
    **{f"#0000{16 + i:02x}": f"var(--role-{i + 1})" for i in range(9)},
}
INK, MUTED, RULE, FIRST, FAINT, SECOND, BAR_1, BAR_2, BAR_3, COMM, PAPER, WAIT, BAR_4, COMM_2, COMM_3, COMM_4, *ROLES = COLOURS
BARS = BAR_1, BAR_2, BAR_3
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 12.0,
    "font.family": ["DejaVu Sans"],  # comes with matplotlib, and is wide: text that fits in it fits in the page's font
    "text.parse_math": False,
}

Series = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Chart:
    """One figure: the heading with the unit, the sentence that a screen reader reads, the SVG, and one for a phone where it differs.

    For the page's script, as JSON: `boxes`, where the axes of each SVG lie in it and what they span; `series` or `bars`, what is in it.
    """

    title: str
    label: str
    svg: str
    narrow: str | None
    boxes: tuple[str, ...] = ()
    series: str = ""
    bars: str = ""

    def with_series(self, *curves: tuple[str, str, float, Series]) -> Chart:
        """With the numbers of its curves (name, colour, width of the line, points), which the page's script shows and draws anew."""
        kept = [
            {
                "name": name,
                "colour": COLOURS[colour],
                "width": width,
                "x": [round(value) for value in points[0]],
                "y": [float(f"{value:.6g}") if math.isfinite(value) else None for value in points[1]],
            }
            for name, colour, width, points in curves
            if points[0]
        ]
        return replace(self, series=json.dumps(kept, separators=(",", ":")))


def loss_chart(steps: Sequence[StepRecord], evals: Sequence[EvalRecord], resumed: Sequence[int] = ()) -> Chart:
    """The training loss, faint as it is and strong as smoothed, with the validation points; `resumed`: after which steps the run was taken up again."""
    train = ([float(r.step) for r in steps], [r.loss for r in steps])
    smoothed = (train[0], smooth(train[1]))
    validation = ([float(r.step) for r in evals], [r.loss for r in evals])

    def draw(axes: Axes) -> None:
        axes.plot(*thin(*train), color=FAINT, linewidth=1)
        axes.plot(*thin(*smoothed), color=FIRST, linewidth=2, solid_capstyle="round")
        axes.plot(*validation, color=SECOND, linewidth=1.5, marker="o", markersize=6, markeredgecolor=PAPER)
        ends = [("training", FIRST, smoothed)] + ([("validation", SECOND, validation)] if evals else [])
        _label_ends(axes, ends, "{:.3f}")
        _mark_resumed(axes, resumed, "resumed")

    label = f"Training loss from {train[1][0]:.3f} at step {steps[0].step} to {train[1][-1]:.3f} at step {steps[-1].step}"
    chart = draw_chart("Loss", label, draw, height=300, wide=WIDE)
    curves = ("training", FAINT, 1.0, thin(*train)), ("training, smoothed", FIRST, 2.0, thin(*smoothed))
    return chart.with_series(*curves, ("validation", SECOND, 1.5, validation))


def _mark_resumed(axes: Axes, steps: Sequence[int], text: str = "") -> None:
    """A dashed line at each of `steps`; the first one says what they are."""
    for number, step in enumerate(steps):
        axes.axvline(step, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        if text and not number:
            axes.annotate(
                text, (step, 1), xycoords=("data", "axes fraction"), xytext=(4, -4), textcoords="offset points", va="top", size=11, color=MUTED
            )


def step_chart(
    title: str,
    steps: Sequence[StepRecord],
    value: Callable[[StepRecord], float | None],
    show: Callable[[float], str],
    resumed: Sequence[int] = (),
) -> Chart | None:
    """One quantity over the steps, its last value written at the end of the line; None when no step has it."""
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
        _mark_resumed(axes, resumed)

    chart = draw_chart(title, f"{title}: {show(curve[1][-1])} at step {steps[-1].step}", draw, height=190, wide=NARROW)
    return chart.with_series((title, FIRST, 1.5, thin(*curve)))


def smooth(values: Sequence[float]) -> list[float]:
    """The mean of about a fortieth of the run around each value. Within half of that of an end there is no window around it: the values there are those of
    the line through the last whole window, so that neither the noise of the last value nor the values before it decide where the curve ends.
    Values that are not finite are left out.
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
    """At most MAX_POINTS points: of each stretch its lowest and its highest one, so that no spike is lost."""
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
    """Writes name and last value beside the end of each curve, moved apart where they would overlap. Curves that end near the
    right edge have their texts in one column.
    """
    placed = []
    for name, colour, (x, y) in ends:
        last = next((i for i in reversed(range(len(y))) if math.isfinite(y[i])), None)
        if last is not None:
            value = show.format(y[last]) if isinstance(show, str) else show(y[last])
            placed.append((y[last], x[last], colour, f"{name} {value}" if name else value))
    placed.sort()
    low, high = axes.get_ylim()
    # Lines of text are 15 px high.
    gap = 15 / (axes.get_figure().get_figheight() * 72 - 40) * (high - low)  # type: ignore[union-attr]
    at = [y for y, *_ in placed]
    for i in range(1, len(at)):
        at[i] = max(at[i], at[i - 1] + gap)
    right = max((x for _, x, *_ in placed), default=0.0)
    beside: dict[str, Any] = {"xytext": (7, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
    for height, (_, end, colour, text) in zip(at, placed, strict=True):
        axes.annotate(text, (right if end > 0.6 * right else end, height), color=colour, **beside)


def draw_chart(
    title: str, label: str, draw: Callable[[Axes], None], *, height: float, wide: float, first_tick: str = "step {:g}"
) -> Chart:
    """Draws the figure, and a wide one for a phone as well; the first tick of the horizontal axis says what the axis counts."""
    svg, box = _svg(draw, wide, height, first_tick, f"{title} wide")
    if wide == NARROW:
        return Chart(title=title, label=label, svg=svg, narrow=None, boxes=(box,))
    narrow, narrow_box = _svg(draw, NARROW, height, first_tick, f"{title} narrow")
    return Chart(title=title, label=label, svg=svg, narrow=narrow, boxes=(box, narrow_box))


def _svg(draw: Callable[[Axes], None], width: float, height: float, first_tick: str, salt: str) -> tuple[str, str]:
    """The picture, and where in it the axes lie and from where to where they go."""
    # The salt keeps the ids of clip paths apart: all figures share one HTML document.
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": salt}):
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained", facecolor="none", dpi=72)
        axes = figure.add_subplot(facecolor="none")
        for side in ("top", "left", "right"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(RULE)
        axes.tick_params(colors=MUTED, length=0, labelsize=11)
        axes.tick_params(axis="x", pad=7)
        axes.grid(True, axis="y", color=RULE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.margins(x=0.01, y=0.1)
        axes.xaxis.set_major_locator(MaxNLocator(6 if width == WIDE else 4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        draw(axes)
        low, high = axes.get_xlim()
        ticks = [x for x in axes.get_xticks() if low <= x <= high]
        axes.set_xticks(ticks, [f"{x:g}" if i else first_tick.format(x) for i, x in enumerate(ticks)])
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        place = axes.get_window_extent()
        box = {
            "left": place.x0, "right": place.x1, "top": height - place.y1, "bottom": height - place.y0,
            "x": [float(each) for each in axes.get_xlim()], "y": [float(each) for each in axes.get_ylim()],
        }
    return _for_page(buffer.getvalue()), json.dumps(box)


def _for_page(svg: str) -> str:
    """Of a stand-alone SVG file only what an HTML page needs, without any address, in the page's colours and font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'(<svg\b[^>]*?) width="[^"]*" height="[^"]*"|(<svg\b[^>]*?) height="[^"]*" width="[^"]*"', r"\1\2", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    referenced = set(re.findall(r"#(\w+)[\")]", svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in referenced else "", svg)
    svg = re.sub(r"#0000[01]\w", lambda found: COLOURS.get(found[0], found[0]), svg)
    return re.sub(r"\s*\n\s*", "\n", svg).strip()
