"""One HTML page of a plan: who holds what, the memory of a rank, the actions of a step, its terms, and time against
memory of the candidates. Plain SVG, no scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from shoal.cli.memory_table import spoken
from shoal.jobs.answer import Chosen
from shoal.mesh import ALONG, AXES, Mesh
from shoal.pipeline import Costs, schedule_of, simulate
from shoal.planner.explain import Explanation, front
from shoal.planner.task import ROLES, TERMS
from shoal.report import units
from shoal.report.replace import replace_text

WIDE, BAR, GAP = 860, 22, 6
COLOURS = ("#3f6fb5", "#d9822b", "#5a9e6f", "#b0457b", "#8a6fbf", "#c2a83e", "#4fa3a5", "#a3543f", "#6b7280")
MOST_RANKS, MOST_ACTIONS = 16, 24

STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:900px;padding:0 1rem;color:#1f2933}
h2{font-size:1.05rem;margin:2rem 0 .5rem}svg{width:100%;height:auto}pre{background:#f3f4f6;padding:.8rem}
text{font:12px system-ui,sans-serif;fill:#1f2933}
@media(prefers-color-scheme:dark){body{background:#14181d;color:#e5e9ee}
text{fill:#e5e9ee}pre{background:#1f262e}}"""


def write_page(path: Path, chosen: Chosen, told: Explanation) -> None:
    """Writes the page of what the planner answered."""
    estimate = chosen.estimate
    plan = spoken(chosen.plan.to_dict()) or "one rank"
    terms = [(what, estimate.terms.get(what, 0.0)) for what in TERMS]
    memory = [(role, estimate.memory.get(role, 0.0)) for role in ROLES]
    sections = {
        "Who holds what": holders(chosen),
        "Memory of the fullest rank": waterfall(memory, chosen.task.most, units.size),
        "A step": gantt(chosen),
        "What a step takes": waterfall(terms, estimate.seconds, units.duration),
        "Time against memory": scatter(chosen),
    }
    body = "".join(f"<h2>{escape(name)}</h2>{svg}" for name, svg in sections.items() if svg)
    head = f"<h1>{escape(plan)}</h1><p>{escape(units.duration(estimate.seconds))} a step; {escape(told.binding)}</p>"
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(plan)}</title><style>{STYLE}</style>'
    replace_text(path, f"{page}{head}{body}</html>\n")


def _svg(height: float, parts: Iterator[str], label: str) -> str:
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {WIDE} {height:.0f}" role="img" aria-label="{escape(label)}">{inside}</svg>'


def _box(x: float, y: float, width: float, text: str, colour: str, shown: str = "") -> str:
    title = f"<title>{escape(text)}</title>"
    where = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{BAR}" rx="2"'
    box = f'<rect {where} fill="{colour}">{title}</rect>'
    return box + (f'<text x="{x + 4:.1f}" y="{y + 15:.1f}">{escape(shown)}</text>' if shown else "")


def holders(chosen: Chosen) -> str:
    """A row of boxes for each rank: its place on each axis, the same colour for the same part of the model."""
    plan = chosen.plan
    mesh = Mesh(plan, 0, plan.size)
    ranks = range(min(plan.size, MOST_RANKS))
    axes = [axis for axis in AXES if mesh.size(axis) > 1] or [AXES[1]]
    each = (WIDE - 120) / max(1, len(ranks))

    def parts() -> Iterator[str]:
        for row, axis in enumerate(axes):
            y = row * (BAR + GAP)
            yield f'<text x="0" y="{y + 15}">{axis}: {mesh.size(axis)}</text>'
            for rank in ranks:
                place = mesh.at(rank)[axis]
                text = f"rank {rank}, {axis} {place}: {ALONG.get(axis, 'other stages').format(plan=plan, copies=1)}"
                yield _box(120 + rank * each, y, each - 2, text, COLOURS[place % len(COLOURS)], str(place))

    return _svg(len(axes) * (BAR + GAP), parts(), "the place of each rank on each axis")


def waterfall(rows: Sequence[tuple[str, float]], whole: float, show: object) -> str:
    """One bar below the other, each from where the last one ended; `whole`: the width."""
    shown = [(name, value) for name, value in rows if value > 0]
    width = (WIDE - 320) / max(whole, sum(value for _, value in shown), 1e-12)

    def parts() -> Iterator[str]:
        at = 0.0
        for row, (name, value) in enumerate(shown):
            y = row * (BAR + GAP)
            text = show(value) if callable(show) else str(value)
            yield f'<text x="0" y="{y + 15}">{escape(name)}</text>'
            yield _box(150 + at * width, y, value * width, f"{name}: {text}", COLOURS[row % len(COLOURS)])
            yield f'<text x="{WIDE - 160}" y="{y + 15}">{escape(text)}</text>'
            at += value
        edge = 150 + whole * width
        yield f'<line x1="{edge:.1f}" x2="{edge:.1f}" y1="0" y2="{len(shown) * (BAR + GAP)}" stroke="#b91c1c"/>'

    return _svg(len(shown) * (BAR + GAP), parts(), "from the first to the last, and what there is")


def gantt(chosen: Chosen) -> str:
    """The actions of the first microbatches on each rank of a pipeline; "" without stages."""
    plan = chosen.plan
    if not plan.pipelined:
        return ""
    number = min(chosen.estimate.microbatches, MOST_ACTIONS)
    schedule = schedule_of(plan, number)
    timeline = simulate(schedule, Costs.even(schedule.stages))
    width = (WIDE - 70) / timeline.seconds
    colours: Mapping[str, str] = {"F": COLOURS[0], "B": COLOURS[2], "I": COLOURS[2], "W": COLOURS[5]}

    def parts() -> Iterator[str]:
        for rank, spans in enumerate(timeline.spans[:MOST_RANKS]):
            y = rank * (BAR + GAP)
            yield f'<text x="0" y="{y + 15}">stage {rank}</text>'
            for action, start, stop in spans:
                yield _box(70 + start * width, y, (stop - start) * width - 0.5, str(action), colours[action.kind])

    return _svg(min(len(timeline.spans), MOST_RANKS) * (BAR + GAP), parts(), "forward and backward of each microbatch")


def scatter(chosen: Chosen) -> str:
    """Candidates by seconds and bytes; those that nothing beats in both are filled."""
    points = [chosen.estimate, *chosen.others]
    slow, large = max(each.seconds for each in points), max(each.bytes for each in points)
    best = {id(each) for each in front(chosen.found)} | {id(chosen.estimate)}
    height = 240

    def parts() -> Iterator[str]:
        yield f'<line x1="60" x2="{WIDE}" y1="{height - 30}" y2="{height - 30}" stroke="#94a3b8"/>'
        yield f'<line x1="60" x2="60" y1="0" y2="{height - 30}" stroke="#94a3b8"/>'
        yield f'<text x="{WIDE - 90}" y="{height - 12}">{units.duration(slow)}</text>'
        yield f'<text x="0" y="12">{units.size(large)}</text>'
        for each in points:
            x, y = 60 + (WIDE - 80) * each.seconds / slow, (height - 30) * (1 - each.bytes / large) + 4
            text = f"{spoken(each.choice.plan(chosen.task.pins).to_dict())}: {units.duration(each.seconds)}"
            fill = COLOURS[0] if id(each) in best else "none"
            title = f"<title>{escape(text)}, {units.size(each.bytes)}</title>"
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}" stroke="{COLOURS[0]}">{title}</circle>'

    return _svg(height, parts(), "seconds of a step against bytes of a rank")
