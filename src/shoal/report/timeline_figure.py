"""A chart of a recorded step: computation, communication and waits of each rank as bars over time."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes

from shoal import units

from .drawing import (
    BAR_1,
    BAR_2,
    BAR_3,
    BAR_4,
    BARS,
    COMM,
    COMM_2,
    COMM_3,
    COMM_4,
    RULE,
    WAIT,
    WIDE,
    Chart,
    draw_chart,
    write_names,
)
from .timeline import LANES, Span

MAX_SPANS = 1500
MAX_RANKS = 8
SHADES = {"compute": (BAR_4, *BARS), "comm": (COMM_4, COMM, COMM_2, COMM_3)}
"""Colours for names without a colour of their own, used in turn."""
OWN_SHADE = {
    "load": BAR_4,
    "forward": BAR_1,
    "backward": BAR_2,
    "optimizer": BAR_3,
    "gradients": COMM,
    "ballot": COMM_2,
    "stop?": COMM_3,
}
WORDS = {
    "load": "loading samples",
    "optimizer": "update by the optimizer",
    "gradients": "exchange of gradients",
    "ballot": "agreement on the step: loss, counts, is all finite",
    "stop?": "whether to stop after the step",
    "norm": "norm of the gradient",
    "weights": "gathering of weights",
    "which weights": "which weights come next",
    "buffers": "mean of buffers",
    "routing": "tokens for each expert",
}
"""Names of spans on the page, where they differ from the recorded names."""
LEAST_BAR = 1.2
"""Width of a bar in pixels at least, so that a thousandth of a step is still visible."""


def timeline_chart(spans: Sequence[Span]) -> Chart:
    """Draws one recorded step: a row for each rank and lane (waits only if there are any), a bar for each span, in
    milliseconds since the first one."""
    ranks = sorted({span.rank for span in spans})[:MAX_RANKS]
    shown = sorted((span for span in spans if span.rank in ranks), key=lambda span: -span.seconds)[:MAX_SPANS]
    lanes = [*LANES, "wait"] if any(span.lane == "wait" for span in spans) else LANES
    rows = {(rank, lane): (len(lanes) + 0.35) * i + j for i, rank in enumerate(ranks) for j, lane in enumerate(lanes)}
    colour = bar_colours(spans)
    origin = min(span.start for span in spans)
    end = max(span.stop for span in spans)

    def draw(axes: Axes) -> None:
        for row, height in rows.items():
            bars = [span for span in shown if (span.rank, span.lane) == row]
            least = LEAST_BAR / WIDE * (end - origin)
            extents = [(1e3 * (span.start - origin), 1e3 * max(span.seconds, least)) for span in bars]
            faces = [WAIT if span.lane == "wait" else colour[family(span.name)] for span in bars]
            axes.broken_barh(extents, (height - 0.4, 0.8), facecolors=faces, edgecolor=faces, linewidth=0.3)
        axes.set_yticks(
            list(rows.values()), [f"rank {rank}  {lane}" if lane == "compute" else lane for rank, lane in rows]
        )
        axes.set_ylim(max(rows.values()) + 0.55, -0.55)
        axes.set_xlim(0, 1e3 * (end - origin))
        axes.grid(False, axis="y")
        axes.grid(True, axis="x", color=RULE, linewidth=0.8)
        names = (
            (1e3 * (span.start - origin), 1e3 * (span.stop - origin), rows[span.rank, span.lane], in_words(span))
            for span in shown
            if (span.rank, span.lane) in rows
        )
        write_names(axes, names)

    label = f"Step {spans[0].step}: compute and communication of {len(ranks)} ranks over {units.duration(end - origin)}"
    chart = draw_chart(
        f"Step {spans[0].step}", label, draw, height=40 + 24 * len(rows), wide=WIDE, first_tick="{:g} ms"
    )
    bars = [
        (
            round(1e3 * (span.start - origin), 4),
            round(1e3 * (span.stop - origin), 4),
            round(rows[span.rank, span.lane], 3),
            _hover_text(span),
        )
        for span in shown
        if (span.rank, span.lane) in rows
    ]
    return replace(chart, bars=json.dumps(bars, separators=(",", ":")))


def _hover_text(span: Span) -> str:
    size = f", {units.size(span.bytes)}" if span.bytes else ""
    return f"{in_words(span)}, rank {span.rank}: {units.duration(span.seconds)}{size}"


def in_words(span: Span) -> str:
    """Returns the name of a span for a reader who has not seen the code that names it."""
    kind = family(span.name)
    words = WORDS.get(kind, kind)
    if span.lane == "wait":
        return f"waiting for {words}"
    return words + span.name.removeprefix(kind).rstrip("]").replace("[", " ")


def family(name: str) -> str:
    """Returns the name without its number, so that the bars "chunk 3" and "chunk 4" share a colour."""
    return re.sub(r"[\s.:_\[#-]*\d+\]?$", "", name) or name


def bar_colours(spans: Sequence[Span]) -> dict[str, str]:
    """Returns a placeholder colour for each family of names: its own, or the next shade of its lane. Waits are left
    out, since they all have one colour."""
    colours: dict[str, str] = {}
    others = dict.fromkeys(SHADES, 0)
    for span in sorted(spans, key=lambda span: span.start):
        kind = family(span.name)
        if span.lane == "wait" or kind in colours:
            continue
        lane = "comm" if span.lane == "comm" else "compute"
        colours[kind] = OWN_SHADE.get(kind) or SHADES[lane][others[lane] % len(SHADES[lane])]
        others[lane] += kind not in OWN_SHADE
    return colours
