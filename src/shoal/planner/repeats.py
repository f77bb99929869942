"""The blocks of a model in what it did: where each runs, and the same with more or fewer of those that are alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from shoal.chunks.assign import Described
from shoal.planner.recording import Event

SHALLOW = 4
"""Blocks of a shallow model: the first, two that are compared, and the last."""
REPEATED = 2
"""The block of a shallow model, counted from 0, that stands for all that a deep one has more."""


class Shift:
    """Names of parameters of later blocks: `blocks.2.mlp.up.weight` by 3 is `blocks.5.mlp.up.weight`. Names of no
    block stay."""

    def __init__(self, name: str) -> None:
        self._pattern = re.compile(rf"{re.escape(name)}\.(\d+)\.(.*)", re.DOTALL)
        self._name = name

    def block(self, name: str) -> int | None:
        """The number of the block that has the parameter."""
        found = self._pattern.fullmatch(name)
        return None if found is None else int(found[1])

    def blocks(self, event: Event) -> set[int]:
        """The numbers of the blocks that an event names."""
        names = event[1] if event[0] == "use" else [event[1]] if event[0] == "came" else []
        return {block for each in names if (block := self.block(each)) is not None}

    def name(self, name: str, by: int) -> str:
        found = self._pattern.fullmatch(name)
        return name if found is None or not by else f"{self._name}.{int(found[1]) + by}.{found[2]}"

    def event(self, event: Event, by: int) -> Event:
        if event[0] == "use":
            return ("use", frozenset(self.name(each, by) for each in event[1]))
        return ("came", self.name(event[1], by)) if event[0] == "came" else event

    def events(self, events: Iterable[Event], by: int) -> Iterator[Event]:
        return (self.event(each, by) if each[0] in ("use", "came") else each for each in events)


@dataclass(frozen=True)
class Repeated:
    """The places in a model's events between which its blocks but the first and the last run, `number` of them that all
    do the same: `forward` to `last` their forwards, `again` to `first_again` their backwards."""

    number: int
    forward: int
    last: int
    again: int
    first_again: int

    @property
    def length(self) -> int:
        """Events of the forward of one block."""
        return (self.last - self.forward) // self.number

    @property
    def length_again(self) -> int:
        """Events of the backward of one block."""
        return (self.first_again - self.again) // self.number


def repeated(events: Sequence[Event], shifted: Shift, number: int = SHALLOW) -> Repeated | None:
    """Finds the repeated blocks among `number`, at least `SHALLOW`; None where those in the middle do not do the
    same."""
    places = turns_of(events, shifted, number)
    if places is None:
        return None
    found = Repeated(number - 2, places[1], places[number - 1], places[number], places[-1])
    ends = zip(pairwise(places[1:number]), pairwise(places[: number - 1 : -1]), strict=True)
    (one, back), *others = [(events[a:b], events[d:c]) for (a, b), (c, d) in ends]
    alike = all(
        [*shifted.events(one, by)] == [*forward] and [*shifted.events(back, by)] == [*backward]
        for by, (forward, backward) in enumerate(others, 1)
    )
    return found if alike else None


def turns_of(events: Sequence[Event], shifted: Shift, number: int) -> list[int] | None:
    """The places in a model's events at which the turns of its blocks begin, of which there are `number`: their
    forwards, the last one's with its backward, and the backwards of the others; None where they do not run one after
    the other."""
    named = [(place, shifted.blocks(each)) for place, each in enumerate(events)]
    turns = [(place, *blocks) for place, blocks in named if len(blocks) == 1]
    if any(len(blocks) > 1 for _, blocks in named) or not turns:
        return None
    starts = turns[:1] + [after for before, after in pairwise(turns) if before[1] != after[1]]
    in_turn = [block for _, block in starts] == [*range(number), *reversed(range(number - 1))]
    return [place for place, _ in starts] if in_turn else None


def more_events(
    events: Sequence[Event], more: int, shifted: Shift, at: Repeated | None = None
) -> tuple[Event, ...] | None:
    """`events` with those of the repeated blocks `more` times more (below 0: less), in forward and, from the last to
    the first, in backward. `at`: where they are, if that is known."""
    at = at or repeated(events, shifted)
    if at is None or at.number + more < 0:
        return None
    forward, backward = events[at.forward :][: at.length], events[at.first_again - at.length_again : at.first_again]
    deeper: list[Event] = list(events[: at.forward])
    for by in range(at.number + more):
        deeper += shifted.events(forward, by)
    deeper += shifted.events(events[at.last : at.again], more)
    for by in reversed(range(at.number + more)):
        deeper += shifted.events(backward, by)
    rest = events[at.first_again :]
    return (*deeper, *_freed(rest, alive([*deeper, *rest]) - alive(events)))


def alive(events: Iterable[Event]) -> int:
    """Bytes that live after `events`."""
    return sum(value for kind, value in events if kind == "live")  # type: ignore[misc]


def _freed(events: Sequence[Event], left: int) -> list[Event]:
    """The last events, with `left` bytes more freed, in pieces as in the longest run of equal frees (keys of dropout,
    which live until the end)."""
    runs = [(event, list(run)) for event, run in groupby(events)]
    at = max(range(len(runs)), key=lambda at: len(runs[at][1]) * (runs[at][0][0] == "live"))
    (kind, value), run = runs[at]
    if left and kind == "live" and left % value == 0:  # type: ignore[operator]
        run[:] = [run[0]] * max(0, len(run) - left // value)  # type: ignore[operator]
    return [event for _, run in runs for event in run]


def more_parameters(
    parameters: Sequence[Described], more: int, shifted: Shift, number: int = SHALLOW
) -> tuple[Described, ...] | None:
    """`parameters` of a model of `number` blocks, which come from the last block to the first, with those of the
    repeated blocks `more` times more (below 0: less). None where these differ."""

    def moved(each: Described, by: int) -> Described:
        name, shape, key = each
        return (
            shifted.name(name, by),
            shape,
            key if key.sparse is None else replace(key, sparse=shifted.name(key.sparse, by)),
        )

    middle = range(REPEATED, number - 1)
    places = [place for place, each in enumerate(parameters) if shifted.block(each[0]) in middle]
    if not places or places != list(range(places[0], places[-1] + 1)) or len(middle) + more < 0:
        return None
    start, end = places[0], places[-1] + 1
    one = [each for each in parameters[start:end] if shifted.block(each[0]) == REPEATED]
    if list(parameters[start:end]) != [moved(each, by) for by in reversed(range(len(middle))) for each in one]:
        return None
    later = [moved(each, more) for each in parameters[:start]]
    copies = [moved(each, by) for by in reversed(range(len(middle) + more)) for each in one]
    return (*later, *copies, *parameters[end:])
