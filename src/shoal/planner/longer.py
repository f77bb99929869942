"""A model on longer rows: what of it grows with their tokens."""

from __future__ import annotations

from dataclasses import replace

from shoal.planner.profile import Cut, PartProfile, Profile
from shoal.planner.temporaries import Lives


def longer(profile: Profile, times: float) -> Profile:
    """The profile of the model on rows of so many `times` the tokens, as far as memory goes: what backward keeps, and
    tables of learned positions that are too short for them."""

    def scaled(value: Cut) -> Cut:
        return replace(value, value=value.value * times)

    own = profile.positions
    more = [max(0, round(times * profile.tokens) - each.rows) * each.width for each in own]
    parts = [
        replace(
            part,
            saved=scaled(part.saved),
            results=scaled(part.results),
            attended=scaled(part.attended),
            convolved=scaled(part.convolved),
            boundary=scaled(part.boundary),
        )
        for part in profile.parts
    ]
    names = [part.name for part in parts]
    for each, elements in zip(own, more, strict=True):
        place = names.index(each.part)
        parts[place] = _with_more(parts[place], elements, each.rows * each.width + elements, each.trained)
    lives = Lives(*map(scaled, profile.lives))
    return replace(profile, parts=tuple(parts), lives=lives, parameters=profile.parameters + sum(more))


def _with_more(part: PartProfile, elements: int, table: int, trained: bool) -> PartProfile:
    """The part with so many `elements` more in a table of positions, which has `table` of them then."""
    grown = replace(part, weights=_added(part.weights, elements))
    if not trained:
        return grown
    largest = part.largest if part.largest.value >= table else Cut(float(table), {})
    return replace(grown, trained=_added(part.trained, elements), largest=largest)


def _added(value: Cut, elements: int) -> Cut:
    """The quantity with what every rank has whole."""
    whole = value.value + elements
    shares = {what: share * value.value / whole if whole else share for what, share in value.shares.items()}
    return Cut(whole, shares)
