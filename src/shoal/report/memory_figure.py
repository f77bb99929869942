"""Who held how much of a memory over one step: stacked areas by role, the budget as a line, the step's phases as a band below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from . import units
from .figures import INK, MUTED, PAPER, ROLES, SECOND, WIDE, Chart, draw_chart
from .levels import MemoryTrace
from .timeline import Span
from .timeline_figure import bar_colours, family

COLOUR_OF = dict(
    zip(
        ("weights", "masters", "gradients", "optimizer state", "optimizer state in turn"),
        (ROLES[i] for i in (0, 1, 2, 3, 4)),
        strict=True,
    )
) | {"weights in use": ROLES[5], "gradients on loan": ROLES[6], "activations": ROLES[7]}
"""From what stays, at the bottom, to what comes and goes."""
OTHER = ROLES[8]
TALL, LOW, AXIS, BAND = 270, 150, 30, 20
"""Pixels: the height of a picture in which something changes, and of one in which nothing does; of the time's axis and of the phases in it."""
FAR = 2.0
"""A budget that is more than so many times the peak is left out of the picture, which it would squash."""


def colour(role: str) -> str:
    return COLOUR_OF.get(role, OTHER)


def in_order(roles: Sequence[str]) -> list[str]:
    """As they are stacked, from the bottom."""
    return sorted(roles, key=lambda role: [*COLOUR_OF, role].index(role))


@dataclass(frozen=True)
class Peak:
    """The most bytes of a role in a tier, and when: a phase of the step and a time in it."""

    tier: str
    role: str
    nbytes: int
    when: str


def peaks(trace: MemoryTrace, spans: Sequence[Span]) -> list[Peak]:
    """One for each role, tier by tier, from what stays to what comes and goes. `spans`: of the trace's step and rank."""
    phases = _phases(spans)
    found = []
    for tier, roles in trace.levels.items():
        for role in in_order(list(roles)):
            sizes = roles[role]
            most = max(sizes)
            moment = trace.at[sizes.index(most)]
            phase = next((span.name for span in phases if span.start <= moment <= span.stop), "")
            time = f"at {units.duration(moment - trace.at[0])}"
            found.append(Peak(tier, role, most, "always" if min(sizes) == most else f"{phase}, {time}" if phase else time))
    return found


def memory_chart(trace: MemoryTrace, tier: str, spans: Sequence[Span]) -> Chart:
    """One tier over one step. `spans`: of the trace's step and rank."""
    total, roles = trace.total(tier), in_order(list(trace.levels[tier]))
    unit, scale = ("GiB", 2**30) if max(total) >= 2**30 else ("MiB", 2**20)
    budget = trace.budgets.get(tier)
    phases = _phases(spans)
    begin = min([trace.at[0], *(span.start for span in phases)])
    end = max([trace.at[-1], *(span.stop for span in phases)])
    times = [1e3 * (moment - begin) for moment in (*trace.at, end)]
    shown = budget if budget is not None and budget <= FAR * max(total) else None
    top = 1.12 * max(max(total), shown or 0) / scale
    height = TALL if len(set(total)) > 1 else LOW
    band = BAND / (height - AXIS - BAND) * top if phases else 0.0

    def draw(axes: Axes) -> None:
        low = [0.0] * len(total)
        for role in roles:
            high = [a + b / scale for a, b in zip(low, trace.levels[tier][role], strict=True)]
            axes.fill_between(*_steps(times, low, high), facecolor=colour(role), linewidth=0)
            low = high
        if shown is not None:
            axes.axhline(shown / scale, color=SECOND, linewidth=1.5, linestyle=(0, (5, 3)))
            text = f"budget {units.size(shown)}"
            axes.text(times[-1], shown / scale + 0.01 * top, text, ha="right", va="bottom", size=11, color=SECOND)
        _draw_phases(axes, phases, begin, band)
        axes.set_xlim(0, times[-1])
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.set_ylim(-band, top)

    most = f"at most {units.size(max(total))}"
    of = f" of {units.size(budget)}" if budget is not None else ""
    label = f"Memory of the {tier} over step {trace.step} of rank {trace.rank}: {most}{of}"
    title = f"{tier.capitalize()}, {unit}: {most}{of}"
    return draw_chart(title, label, draw, height=height, wide=WIDE, first_tick="{:g} ms")


def _steps(times: Sequence[float], low: Sequence[float], high: Sequence[float]) -> tuple[list[float], list[float], list[float]]:
    """The corners of an area whose edges `low` and `high` change at `times` only, and hold until the next; `times` has the end too."""
    corners: list[tuple[float, float, float]] = []
    for i, (a, b) in enumerate(zip(low, high, strict=True)):
        if not corners or corners[-1][1:] != (a, b):
            corners += [(times[i], *corners[-1][1:])] if corners else []
            corners.append((times[i], a, b))
    corners.append((times[-1], low[-1], high[-1]))
    x, bottom, top = (list(each) for each in zip(*corners, strict=True))
    return x, bottom, top


def _phases(spans: Sequence[Span]) -> list[Span]:
    return sorted((span for span in spans if span.lane == "compute"), key=lambda span: span.start)


def _draw_phases(axes: Axes, phases: Sequence[Span], begin: float, band: float) -> None:
    """A band from zero to minus `band`: forward, backward and whatever else the trainer's thread did, with names where there is room."""
    colours = bar_colours(phases)
    extents = [(1e3 * (span.start - begin), 1e3 * span.seconds) for span in phases]
    faces = [colours[family(span.name)] for span in phases]
    axes.broken_barh(extents, (-0.95 * band, 0.8 * band), facecolors=faces, edgecolor=PAPER, linewidth=0.7)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.set_xlim(0, max((start + length for start, length in extents), default=1.0))
    axes.figure.canvas.draw()  # the layout, on which the room for names depends
    left, right = axes.get_xlim()
    pixels = axes.bbox.width / axes.figure.dpi * 72 / ((right - left) or 1.0)
    for span, (start, length) in zip(phases, extents, strict=True):
        if length * pixels > 6.4 * len(span.name) + 6:
            axes.text(start + length / 2, -0.55 * band, span.name, ha="center", va="center_baseline", size=11, color=INK)
