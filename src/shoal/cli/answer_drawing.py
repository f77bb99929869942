"""Boxes, axes and legends of the planner's page, as plain SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape

WIDE, BAR, GAP, LEFT, FOOT = 860, 22, 6, 190, 44
COLOURS = ("#3f6fb5", "#d9822b", "#5a9e6f", "#b0457b", "#8a6fbf", "#c2a83e", "#4fa3a5", "#a3543f", "#6b7280")
RULE, LIMIT = "#94a3b8", "#b91c1c"
FAR = 4
"""How many times as much as is used a limit may be, to be drawn."""


def svg(height: float, parts: Iterable[str], label: str) -> str:
    """A picture of the page's width."""
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {WIDE} {height:.0f}" role="img" aria-label="{escape(label)}">{inside}</svg>'


def text(x: float, y: float, shown: str, anchor: str = "start") -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(shown)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = RULE) -> str:
    """A thin line."""
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def box(x: float, y: float, width: float, told: str, colour: str, shown: str = "") -> str:
    """A box that tells something when it is pointed at; `shown` is written where it has room."""
    where = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{BAR}" rx="2"'
    drawn = f'<rect {where} fill="{colour}"><title>{escape(told)}</title></rect>'
    return drawn + (text(x + 4, y + 15, shown) if shown and width > 7 * len(shown) + 6 else "")


def ticks(most: float, number: int = 5, base: float = 10.0) -> list[float]:
    """Round numbers from 0 up to `most`, about so many. `base`: what they are round in, 2 for bytes."""
    if not most > 0:
        return [0.0]
    rough = most / number
    power = base ** math.floor(math.log(rough, base))
    steps = (1, 2, 5, 10) if base == 10 else (1, 2)
    step = next((each * power for each in steps if each * power >= rough * (1 - 1e-9)), base * power)
    return [step * place for place in range(int(most / step * (1 + 1e-9)) + 1)]


def across(
    height: float, most: float, shown: Callable[[float], str], title: str, base: float = 10.0, right: float = WIDE - 20
) -> Iterator[str]:
    """A horizontal axis at `height` from LEFT to `right`, of values from 0 to `most`, with its title below."""
    yield line(LEFT, height, right, height)
    for each in ticks(most, 5, base):
        x = LEFT + (right - LEFT) * each / most if most else LEFT
        yield line(x, height, x, height + 4)
        yield text(x, height + 17, shown(each), "middle")
    yield text((LEFT + right) / 2, height + 35, title, "middle")


def upward(bottom: float, most: float, shown: Callable[[float], str], title: str, base: float = 10.0) -> Iterator[str]:
    """A vertical axis at LEFT from `bottom` up to 20, of values from 0 to `most`, with its title above."""
    yield line(LEFT, 20, LEFT, bottom)
    for each in ticks(most, 4, base):
        y = bottom - (bottom - 20) * each / most if most else bottom
        yield line(LEFT - 4, y, LEFT, y)
        yield text(LEFT - 8, y + 4, shown(each), "end")
    yield text(0, 12, title)


def legend(y: float, names: Mapping[str, str]) -> Iterator[str]:
    """What colours stand for, in one line. `names`: colours by what they mean."""
    x = float(LEFT)
    for name, colour in names.items():
        yield f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12" fill="{colour}"/>'
        yield text(x + 17, y, name)
        x += 32 + 6.6 * len(name)


def waterfall(
    rows: Sequence[tuple[str, float]],
    limit: float | None,
    shown: Callable[[float], str],
    title: str,
    base: float = 10.0,
) -> str:
    """One bar below the other, each from where the last one ended, over an axis; `limit`: marked by a line, or said
    where all is small beside it."""
    rows = [(name, value) for name, value in rows if value > 0]
    used = max(sum(value for _, value in rows), 1e-12)
    if limit is not None and limit > FAR * used:
        title, limit = f"{title}: {shown(limit)}, beyond the right end", None
    elif limit is not None:
        title = f"{title}: {shown(limit)}, the line"
    most = max(limit or 0.0, used)
    right, height = WIDE - 90, len(rows) * (BAR + GAP)
    scale = (right - LEFT) / most

    def parts() -> Iterator[str]:
        at = 0.0
        for row, (name, value) in enumerate(rows):
            y = row * (BAR + GAP)
            yield text(0, y + 15, name)
            yield box(LEFT + at * scale, y, value * scale, f"{name}: {shown(value)}", COLOURS[row % len(COLOURS)])
            yield text(WIDE, y + 15, shown(value), "end")
            at += value
        if limit is not None:
            yield line(LEFT + limit * scale, 0, LEFT + limit * scale, height, LIMIT)
        yield from across(height + 2, most, shown, title, base, right)

    return svg(height + FOOT, parts(), title)
