"""A chart of one tier's memory over a step: stacked areas by role, the budget as a line, the step's phases below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from shoal import units

from .drawing import MUTED, PAPER, ROLES, SECOND, WIDE, Chart, draw_chart, write_names
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
"""Stacked from the bottom: permanent roles first, then temporary ones."""
OTHER = ROLES[8]
TALL, LOW, AXIS, BAND = 270, 150, 30, 20
"""Heights in pixels: of a chart in which memory changes, of one in which it does not, of the axis, of the phases."""
FAR = 2.0
"""A budget above this multiple of the peak is not drawn, since it would squash the chart."""


def colour(role: str) -> str:
    return COLOUR_OF.get(role, OTHER)


def in_order(roles: Sequence[str]) -> list[str]:
    """Returns the roles in the order in which they are stacked, from the bottom."""
    return sorted(roles, key=lambda role: [*COLOUR_OF, role].index(role))


@dataclass(frozen=True)
class Peak:
    """The peak of a role in a tier in bytes, and when: a phase and a time of the step."""

    tier: str
    role: str
    nbytes: int
    when: str


def peaks(trace: MemoryTrace, spans: Sequence[Span]) -> list[Peak]:
    """Returns the peak of each role, tier by tier, permanent roles first. `spans`: of the trace's step and rank."""
    phases = _phases(spans)
    found = []
    for tier, roles in trace.levels.items():
        for role in in_order(list(roles)):
            sizes = roles[role]
            most = max(sizes)
            moment = trace.at[sizes.index(most)]
            phase = next((span.name for span in phases if span.start <= moment <= span.stop), "")
            time = f"at {units.duration(moment - trace.at[0])}"
            found.append(
                Peak(tier, role, most, "always" if min(sizes) == most else f"{phase}, {time}" if phase else time)
            )
    return found


def memory_chart(trace: MemoryTrace, tier: str, spans: Sequence[Span]) -> Chart:
    """Draws one tier over one step. `spans`: of the trace's step and rank."""
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


def _steps(
    times: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> tuple[list[float], list[float], list[float]]:
    """Returns the corners (x, bottom, top) of an area whose edges `low` and `high` are constant between `times`.

    times: one more than `low` and `high`: the last is the end.
    """
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
    """Draws the phases of the trainer's thread as a band from 0 to -`band`, with names where there is room."""
    colours = bar_colours(phases)
    extents = [(1e3 * (span.start - begin), 1e3 * span.seconds) for span in phases]
    faces = [colours[family(span.name)] for span in phases]
    axes.broken_barh(extents, (-0.95 * band, 0.8 * band), facecolors=faces, edgecolor=PAPER, linewidth=0.7)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.set_xlim(0, max((start + length for start, length in extents), default=1.0))
    named = zip(phases, extents, strict=True)
    write_names(axes, ((start, start + length, -0.55 * band, span.name) for span, (start, length) in named))
