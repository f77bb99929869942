"""One HTML page of a plan: who holds what, the memory of a rank, the actions of a step, its terms, and time against
memory of the candidates. Plain SVG, no scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from shoal import units
from shoal.cli.answer_drawing import (
    BAR,
    COLOURS,
    FOOT,
    GAP,
    LEFT,
    LIMIT,
    WIDE,
    across,
    box,
    legend,
    line,
    svg,
    text,
    upward,
    waterfall,
)
from shoal.errors import UserError
from shoal.jobs.answer import Chosen
from shoal.mesh import ALONG, AXES, Mesh
from shoal.pipeline import Costs, schedule_of, simulate
from shoal.planner.ends import ends
from shoal.planner.explain import Explanation, front
from shoal.planner.pipes import costs_of
from shoal.planner.task import NAMES, ROLES, TERMS, Estimate
from shoal.replace import replace_text
from shoal.toml import plan_text, toml_fields

MOST_RANKS, MOST_ACTIONS = 16, 24
KINDS: Mapping[str, tuple[str, str]] = {
    "F": ("forward", COLOURS[0]),
    "B": ("backward", COLOURS[2]),
    "I": ("backward of inputs", COLOURS[2]),
    "W": ("backward of weights", COLOURS[5]),
}
AFTER = {what: (NAMES[what], COLOURS[colour]) for what, colour in (("copies", 3), ("optimizer", 1))}

STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:900px;padding:0 1rem;color:#1f2933}
h2{font-size:1.05rem;margin:2rem 0 .5rem}svg{width:100%;height:auto}pre{background:#f3f4f6;padding:.8rem}
text{font:12px system-ui,sans-serif;fill:#1f2933}
@media(prefers-color-scheme:dark){body{background:#14181d;color:#e5e9ee}
text{fill:#e5e9ee}pre{background:#1f262e}}"""


def write_page(path: Path, chosen: Chosen, told: Explanation) -> None:
    """Writes the page of what the planner answered. Raises UserError where it cannot be written."""
    estimate = chosen.estimate
    plan = plan_text(chosen.plan.to_dict())
    terms = [(NAMES[what], estimate.terms.get(what, 0.0)) for what in TERMS]
    memory = [(role, estimate.memory.get(role, 0.0)) for role in ROLES]
    sections = {
        "Who holds what": (holders(chosen), holding(chosen)),
        "Memory of the fullest rank": (
            waterfall(memory, chosen.task.usable, units.size, "bytes of the device; a rank may use", 2),
            elsewhere(estimate),
        ),
        "A step": gantt(chosen),
        "What a step takes": (
            waterfall(terms, None, units.duration, "time of a step"),
            "Of communication and offload, what is not hidden behind compute.",
        ),
        "Time against memory": (
            scatter(chosen),
            "The filled ones are beaten by none in both; the line joins them, and the ring is the plan above.",
        ),
    }
    body = "".join(
        f"<h2>{escape(name)}</h2>{drawn}{f'<p>{escape(said)}</p>' if said else ''}"
        for name, (drawn, said) in sections.items()
    )
    about = f"{units.duration(estimate.seconds)} a step; held back by {told.binding}"
    head = f"<h1>{escape(plan)}</h1><p>{escape(about)}</p>"
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(plan)}</title><style>{STYLE}</style>'
    try:
        replace_text(path, f"{page}{head}{body}</html>\n")
    except OSError as error:
        raise UserError(f"--html {path} cannot be written: {error.strerror}. Give another file") from error


def holding(chosen: Chosen) -> str:
    """Says which share of the state a rank has, and where."""
    plan, choice = chosen.plan, chosen.estimate.choice
    cut = ["optimizer state and masters", "gradients", "weights"][: plan.zero]
    said = [f"Shown are the first {MOST_RANKS} of {plan.size} ranks."] if plan.size > MOST_RANKS else []
    if plan.pipelined and choice.stages:
        said.append(f"Blocks of the stages: {', '.join(map(str, choice.stages))}.")
    if cut and plan.copy_size > 1:
        parts = " and ".join([", ".join(cut[:-1]), cut[-1]]) if len(cut) > 1 else cut[0]
        rest = "; the rest each has whole" if plan.zero < 3 else ""
        said.append(f"Each of {plan.copy_size} ranks has a part of the {parts}{rest}.")
    if choice.offload:
        said.append("What its device has no room for is at home on the host.")
    return " ".join(said)


def elsewhere(estimate: Estimate) -> str:
    """Says what the fullest rank has on its host, and on the disk."""
    found = (("of its host", estimate.on_host), ("of the disk", estimate.on_disk))
    said = [f"{units.size(nbytes)} {where}" for where, nbytes in found if nbytes]
    return f"Beside that {' and '.join(said)}." if said else ""


def holders(chosen: Chosen) -> str:
    """A row of boxes for each axis: the place of each rank on it, in a colour of its own."""
    plan = chosen.plan
    mesh = Mesh(plan, 0, plan.size)
    ranks = range(min(plan.size, MOST_RANKS))
    axes = [axis for axis in AXES if mesh.size(axis) > 1] or [AXES[1]]
    each, height = (WIDE - LEFT) / len(ranks), len(axes) * (BAR + GAP)

    def parts() -> Iterator[str]:
        for row, axis in enumerate(axes):
            y = row * (BAR + GAP)
            yield text(0, y + 15, f"{axis}: {mesh.size(axis)} places")
            for rank in ranks:
                place = mesh.at(rank)[axis]
                told = f"rank {rank}, {axis} {place}: {ALONG.get(axis, 'other stages').format(plan=plan, copies=1)}"
                yield box(LEFT + rank * each, y, each - 2, told, COLOURS[place % len(COLOURS)], str(place))
        for rank in ranks:
            yield text(LEFT + (rank + 0.5) * each, height + 12, str(rank), "middle")
        yield text((LEFT + WIDE) / 2, height + 30, "rank; same place and colour on an axis: the same part", "middle")

    return svg(height + 36, parts(), "the place of each rank on each axis")


def gantt(chosen: Chosen) -> tuple[str, str]:
    """The actions of the first microbatches on each rank of a pipeline, in the order of its schedule and for as long as
    is predicted, and what each rank does after its last one; with a line on what is left out."""
    plan, estimate = chosen.plan, chosen.estimate
    number = min(estimate.microbatches, MOST_ACTIONS)
    schedule = schedule_of(plan, number)
    costs = costs_of(estimate.stages, estimate.message) if estimate.stages else Costs.even(schedule.stages)
    timeline = simulate(schedule, costs)
    rows = timeline.spans[:MOST_RANKS]
    after = [{what: getattr(each, what) for what in AFTER} for each in ends(chosen.task, estimate)]
    most = max(spans[-1][2] + sum(own.values()) for spans, own in zip(timeline.spans, after, strict=True))
    height, scale = 20 + len(rows) * (BAR + GAP), (WIDE - 20 - LEFT) / most
    kinds = {action.kind for spans in rows for action, _, _ in spans}
    names = {KINDS[kind][0]: KINDS[kind][1] for kind in "FBIW" if kind in kinds}

    def parts() -> Iterator[str]:
        shown = [AFTER[what] for what in AFTER if any(own[what] for own in after)]
        yield from legend(12, {**names, **dict(shown)})
        for rank, (spans, own) in enumerate(zip(rows, after, strict=False)):
            y = 20 + rank * (BAR + GAP)
            yield text(0, y + 15, f"place {rank}" if len(rows) > 1 else "each rank")
            for action, start, stop in spans:
                told = f"{action}: {units.duration(start)} to {units.duration(stop)}"
                number, colour = str(action.microbatch), KINDS[action.kind][1]
                yield box(LEFT + start * scale, y, (stop - start) * scale - 0.5, told, colour, number)
            at = spans[-1][2]
            for what, seconds in ((what, own[what]) for what in AFTER if own[what]):
                told, colour = f"{AFTER[what][0]}: {units.duration(seconds)}", AFTER[what][1]
                yield box(LEFT + at * scale, y, seconds * scale - 0.5, told, colour)
                at += seconds
        yield from across(height, most, units.duration, "time; the number in a box is that of its microbatch")

    more = estimate.microbatches - number
    said = f"Left out: {more} more microbatches of {estimate.microbatches}." if more else ""
    return svg(height + FOOT, parts(), "forward and backward of each microbatch"), said


def scatter(chosen: Chosen) -> str:
    """Candidates by seconds and bytes; those that nothing beats in both are filled and joined."""
    points = [*chosen.found.best, chosen.estimate]
    slow, large = max(each.seconds for each in points) * 1.05, max(each.bytes for each in points) * 1.05
    best = front(chosen.found)
    bottom, right = 240, WIDE - 20

    def place(seconds: float, nbytes: float) -> tuple[float, float]:
        return LEFT + (right - LEFT) * seconds / slow, bottom - (bottom - 20) * nbytes / large

    def parts() -> Iterator[str]:
        yield from across(bottom, slow, units.duration, "time of a step", right=right)
        yield from upward(bottom, large, units.size, "memory of the fullest rank", 2)
        if chosen.task.usable < large:
            height = place(0, chosen.task.usable)[1]
            yield line(LEFT, height, right, height, LIMIT)
        joined = " ".join(",".join(f"{each:.1f}" for each in place(one.seconds, one.bytes)) for one in best)
        yield f'<polyline points="{joined}" fill="none" stroke="{COLOURS[0]}"/>'
        for each in points:
            x, y = place(each.seconds, each.bytes)
            told = f"{toml_fields(each.choice.plan(chosen.task.pins).to_dict())}: {units.duration(each.seconds)}"
            fill = COLOURS[0] if any(each is other for other in best) else "none"
            title = f"<title>{escape(told)}, {units.size(each.bytes)}</title>"
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}" stroke="{COLOURS[0]}">{title}</circle>'
        x, y = place(chosen.estimate.seconds, chosen.estimate.bytes)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="{COLOURS[1]}" stroke-width="2"/>'

    return svg(bottom + FOOT, parts(), "seconds of a step against bytes of a rank")
