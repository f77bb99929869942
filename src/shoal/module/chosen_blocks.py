"""Which blocks `plan.recompute = {name = "blocks", ...}` means. Blocks are numbered from 0 over the whole model,
whatever stage of a pipeline has them.

    full = 12                      the first twelve
    full = "0-11, 40"              these ranges
    full = [0, 3]                  these
    selective = 8                  the first eight of those that are not `full`
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import count, groupby

from shoal.errors import UserError

Places = int | str | Sequence[int]
_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


def chosen_blocks(
    number: int, which: Sequence[int], every: int, full: Places, selective: Places
) -> tuple[list[int], list[int]]:
    """Returns the blocks of `number` that are computed again as a whole, and those of which some results are kept.
    Raises UserError for what cannot be meant."""
    ways = [bool(which), bool(every), bool(full or selective)]
    if sum(ways) != 1 or every < 0:
        raise UserError(
            "plan.recompute: of blocks give either which = [places] or every = 2 (every second one), or full and "
            'selective: a number of blocks, places, or ranges ("0-11, 40")'
        )
    if every:
        return list(range(0, number, every)), []
    whole = _places("which" if which else "full", which or full, number, ())
    some = _places("selective", selective, number, {*whole})
    if both := sorted({*whole} & {*some}):
        raise UserError(f"plan.recompute: full = {full!r} and selective = {selective!r} both name block {both[0]}")
    return whole, some


def over_budget(blocks: Sequence[tuple[float, float]], keep: float) -> list[int]:
    """Returns the places of the `blocks` that are computed again where backward is to keep the part `keep` of the bytes
    that it would: those that save most first, until little enough is kept. Of each block: the bytes that backward keeps
    of it, and those of them that it saves."""
    left = whole = sum(kept for kept, _ in blocks)
    found = []
    for place in sorted(range(len(blocks)), key=lambda place: -blocks[place][1]):
        if left > keep * whole and (saves := blocks[place][1]) > 0:
            found.append(place)
            left -= saves
    return found


def _places(what: str, given: Places, number: int, taken: Collection[int]) -> list[int]:
    """The blocks that `given` means; of a number the first that are not `taken`."""
    if isinstance(given, bool) or not isinstance(given, int | str | Sequence):
        raise _wrong(what, given)
    if isinstance(given, int):
        left = [place for place in range(number) if place not in taken]
        if not 0 <= given <= len(left):
            raise UserError(f"plan.recompute: {what} = {given}: give 0 to {len(left)} of the model's {number} blocks")
        return left[:given]
    places = _ranges(what, given) if isinstance(given, str) else sorted(set(given))
    if any(type(place) is not int for place in places):
        raise _wrong(what, given)
    if any(place not in range(number) for place in places):
        raise UserError(f"plan.recompute: {what} = {given!r}: the model has the blocks 0 to {number - 1}")
    return places


def _ranges(what: str, text: str) -> list[int]:
    found: set[int] = set()
    for part in filter(str.strip, text.split(",")):
        ends = _RANGE.fullmatch(part)
        if ends is None or len(part) > 20:
            raise _wrong(what, text)
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last < first:
            raise _wrong(what, text)
        found |= {*range(first, min(last, first + _MOST) + 1)}
    if text and not found:
        raise _wrong(what, text)
    return sorted(found)


_MOST = 1 << 16
"""Blocks of one range."""


def _wrong(what: str, given: object) -> UserError:
    return UserError(
        f'plan.recompute: {what} = {given!r:.100}: give a number of blocks, a list of places, or ranges ("0-11, 40")'
    )


def as_ranges(places: Sequence[int]) -> str:
    """Writes ascending places as ranges: "0-11, 40"."""
    runs = []
    counter = count()
    for _, group in groupby(places, key=lambda place: place - next(counter)):
        run = list(group)
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(runs)
