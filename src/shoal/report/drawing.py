"""Draws charts as inline SVG with the page's colours and font, so that dark mode and print need no second copy."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

WIDE, NARROW = 880.0, 410.0
"""Widths in CSS pixels. A figure is drawn at the width at which it is shown, so that its text does not shrink."""

# matplotlib needs colours; each of these is a placeholder for a variable of the page's style sheet.
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
(
    INK,
    MUTED,
    RULE,
    FIRST,
    FAINT,
    SECOND,
    BAR_1,
    BAR_2,
    BAR_3,
    COMM,
    PAPER,
    WAIT,
    BAR_4,
    COMM_2,
    COMM_3,
    COMM_4,
    *ROLES,
) = COLOURS
BARS = BAR_1, BAR_2, BAR_3
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 12.0,
    "font.family": ["DejaVu Sans"],  # part of matplotlib, and wide: text that fits in it fits in the page's font
    "text.parse_math": False,
}

Series = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Chart:
    """A figure of the page.

    title: the heading, with the unit.
    label: a sentence for screen readers.
    svg, narrow: the SVG, and one for a phone where it differs.
    boxes: JSON for the page's script: for each SVG the position of its axes and their limits.
    series, bars: JSON for the page's script: the data shown.
    """

    title: str
    label: str
    svg: str
    narrow: str | None
    boxes: tuple[str, ...] = ()
    series: str = ""
    bars: str = ""

    def with_series(self, *curves: tuple[str, str, float, Series]) -> Chart:
        """Returns the chart with the numbers of its curves, which the page's script shows and redraws.

        curves: (name, colour, width of the line, points) of each curve.
        """
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


def draw_chart(
    title: str, label: str, draw: Callable[[Axes], None], *, height: float, wide: float, first_tick: str = "step {:g}"
) -> Chart:
    """Draws a figure; a wide one also at the width of a phone.

    title, label: as in `Chart`.
    draw: draws on the axes.
    height, wide: in CSS pixels.
    first_tick: format of the horizontal axis's first tick, which names the unit.
    """
    svg, box = _svg(draw, wide, height, first_tick, f"{title} wide")
    if wide == NARROW:
        return Chart(title=title, label=label, svg=svg, narrow=None, boxes=(box,))
    narrow, narrow_box = _svg(draw, NARROW, height, first_tick, f"{title} narrow")
    return Chart(title=title, label=label, svg=svg, narrow=narrow, boxes=(box, narrow_box))


def _svg(draw: Callable[[Axes], None], width: float, height: float, first_tick: str, salt: str) -> tuple[str, str]:
    """Returns the SVG, and the position and limits of its axes as JSON.

    salt: makes the ids of clip paths unique, since all figures share one HTML document.
    """
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
        extent = axes.get_window_extent()
        box = {
            "left": extent.x0,
            "right": extent.x1,
            "top": height - extent.y1,
            "bottom": height - extent.y0,
            "x": [float(each) for each in axes.get_xlim()],
            "y": [float(each) for each in axes.get_ylim()],
        }
    return _for_page(buffer.getvalue()), json.dumps(box)


def _for_page(svg: str) -> str:
    """Reduces a stand-alone SVG file to what an HTML page needs, without addresses, in the page's colours and font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(
        r'(<svg\b[^>]*?) width="[^"]*" height="[^"]*"|(<svg\b[^>]*?) height="[^"]*" width="[^"]*"', r"\1\2", svg
    )
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    referenced = set(re.findall(r"#(\w+)[\")]", svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in referenced else "", svg)
    svg = re.sub(r"#0000[01]\w", lambda found: COLOURS.get(found[0], found[0]), svg)
    return re.sub(r"\s*\n\s*", "\n", svg).strip()


def write_names(axes: Axes, bars: Iterable[tuple[float, float, float, str]]) -> None:
    """Writes a name into each bar that has room for it. `bars`: (left, right, y, name), in the units of the axes."""
    axes.figure.canvas.draw()  # computes the layout, on which the room for names depends
    left, right = axes.get_xlim()
    pixels = axes.bbox.width / axes.figure.dpi * 72 / (right - left)
    for start, stop, y, name in bars:
        if (stop - start) * pixels > 6.4 * len(name) + 6:
            axes.text((start + stop) / 2, y, name, ha="center", va="center_baseline", size=11, color=INK)
