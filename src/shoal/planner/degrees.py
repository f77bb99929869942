"""The degrees of a plan by what they do, how many ranks apart their groups are, and which there are of so many ranks.
The only file of the planner that knows the names of axes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from shoal.plan import Plan

PINS = {"pp": "stages", "dp": "copies", "cp": "tokens", "tp": "parts", "ep": "experts"}
"""The name of each degree in a plan, and here."""
FIELDS = {what: field for field, what in PINS.items()}
"""The name of each degree here, and in a plan."""
_GROUPS = {**PINS, "edp": "copies", "tied": "stages", "routing": "experts"}
"""What the ranks of a group divide, by the first word of its name."""
Ways = Mapping[str, tuple[int, ...]]
"""How a model may be divided ("parts", "tokens", "ring", "experts"), each with the numbers of ranks of which the first
that goes is traced."""


class Spread(NamedTuple):
    """How many ranks divide what: `stages` of the model; `copies` have other samples; `tokens` of each row; `parts` of
    each matrix; `experts` among copies and tokens. `ring`: how attention sees whole rows. A tuple, since a search makes
    ten thousands and looks a million times up what it found of one."""

    stages: int = 1
    copies: int = 1
    tokens: int = 1
    parts: int = 1
    experts: int = 1
    ring: bool = False

    @property
    def size(self) -> int:
        return self.stages * self.copies * self.tokens * self.parts

    @property
    def replicas(self) -> int:
        """Ranks that have the same weights."""
        return self.copies * self.tokens

    @property
    def inside(self) -> Spread:
        """How one stage of one copy is divided: all that decides what a part of it takes and holds."""
        return _inside(self.tokens, self.parts, self.experts, self.ring)

    def stride(self, what: str) -> int:
        """How far apart in rank the members of a group are: the innermost, which talk most, are neighbours."""
        return {"parts": 1, "tokens": self.parts, "copies": self.parts * self.tokens, "experts": self.parts}.get(
            what, self.parts * self.tokens * self.copies
        )

    def plan(self, **others: Any) -> Plan:
        """The plan of these degrees."""
        context = "ring" if self.ring and self.tokens > 1 else "ulysses"
        return Plan(
            pp=self.stages, dp=self.copies, cp=self.tokens, tp=self.parts, ep=self.experts, context=context, **others
        )

    @classmethod
    def of(cls, plan: Plan) -> Spread:
        return cls(plan.pp, plan.dp, plan.cp, plan.tp, plan.ep, plan.context == "ring")


@cache
def _inside(tokens: int, parts: int, experts: int, ring: bool) -> Spread:
    return Spread(tokens=tokens, parts=parts, experts=experts, ring=ring)


def divided_by(group: str) -> str:
    """What the ranks of the group with this name divide; "" where it is none of a degree."""
    first = re.match("[a-z]*", group)
    return _GROUPS.get(first.group() if first else "", "")


def ways(pins: Mapping[str, Any], size: int) -> Ways:
    """How `size` ranks may divide a model beside stages and copies, where `pins` do not say that they do not. The
    numbers of ranks are the primes of the degree that is pinned, else those of all ranks: two may not come out even (3
    heads) where three do. So are they beside a pinned degree that does not divide these: it is refused, and what would
    do is said."""
    found = {}
    for field in ("tp", "cp", "ep") if size > 1 else ():
        if (given := pins.get(field, size)) != 1:
            found[PINS[field]] = _primes(size if size % given else given)
    return {**found, **({"ring": found["tokens"]} if "tokens" in found else {})}


def traced_as(what: str, ranks: int, placements: Mapping[str, str] | None) -> Plan:
    """The plan of so many ranks that divide a model in this way alone."""
    if what == "experts":
        return Plan(dp=ranks, ep=ranks)
    if what == "parts":
        return Plan(tp=ranks, placements=placements)
    return Plan(cp=ranks, context="ring" if what == "ring" else "ulysses")


def _primes(number: int) -> tuple[int, ...]:
    """The primes that divide `number`, ascending."""
    return tuple(each for each in divisors(number) if each > 1 and len(divisors(each)) == 2)


def chosen_fields(plan: Plan) -> list[str]:
    """The fields of a plan that a planner chose: its degree of copies, and all that are not the default."""
    return sorted({*plan.to_dict(), "dp"})


def divisors(number: int, most: int | None = None) -> list[int]:
    """The divisors of `number` up to `most`, ascending."""
    return [each for each in range(1, min(number, most or number) + 1) if number % each == 0]


def degrees(size: int, most: Mapping[str, int], pins: Mapping[str, Any]) -> Iterator[Spread]:
    """All degrees of `size` ranks. `most`: the largest of each kind ("stages", "parts", ...), a missing one is 1; for
    "parts", "tokens" and "experts" numbers that they have to divide (see `why_not_tokens`). `pins`: fields of a plan
    that are given."""
    wanted = {PINS[key]: value for key, value in pins.items() if key in PINS}

    def legal(what: str, left: int) -> list[int]:
        if what in wanted:
            return [wanted[what]] if left % wanted[what] == 0 else []
        limit = most.get(what, 1)
        return [each for each in divisors(left, limit) if what == "stages" or limit % each == 0]

    for stages in legal("stages", size):
        for parts in legal("parts", size // stages):
            for tokens in legal("tokens", size // (stages * parts)):
                copies = size // (stages * parts * tokens)
                if wanted.get("copies", copies) != copies:
                    continue
                here = [wanted["experts"]] if "experts" in wanted else divisors(most.get("experts", 1))
                for experts in here:
                    if copies * tokens % experts == 0 and most.get("experts", 1) % experts == 0:
                        yield from _by_context(Spread(stages, copies, tokens, parts, experts), most, pins)


def _by_context(spread: Spread, most: Mapping[str, int], pins: Mapping[str, Any]) -> Iterator[Spread]:
    ways = [False, True] if spread.tokens > 1 else [False]
    if "context" in pins:
        ways = [pins["context"] == "ring"]
    for ring in ways:
        if spread.tokens == 1 or not why_not_tokens(spread._replace(ring=ring), most):
            yield spread._replace(ring=ring)


def why_not_tokens(spread: Spread, most: Mapping[str, int]) -> str:
    """Why ranks cannot share the tokens of a row so; "" if they can. A ring cuts a row in two pieces a rank, and deals
    out no heads; else heads, and those of keys and values, are dealt out to the ranks that have all parts of them.

    most: numbers that the ranks have to divide, of tokens ("tokens", in a ring "ring"; 0: there is none), of "heads"
        and of "keys", and the tokens of a "row"; a missing one is not known
    """
    ranks, row = spread.tokens, most.get("row", most.get("tokens", 1))
    number = most.get("ring", ranks) if spread.ring else most.get("tokens", 1)
    if not number or number % ranks:
        return f"rows of {row} tokens do not come out even in {ranks * (1 + spread.ring)} pieces"
    if spread.ring:
        return ""
    if ranks == most.get("row"):
        return f"rows of {row} tokens leave each of {ranks} ranks one, whose mask does not show what it sees"
    heads, keys = most.get("heads", 0), most.get("keys", 0)
    if heads % (spread.parts * ranks):
        return f"{heads} heads do not come out even among {spread.parts * ranks} ranks"
    keys = max(1, keys // spread.parts) if keys else ranks
    if keys % ranks and ranks % keys:
        return f"{keys} heads of keys and values do not come out even among {ranks} ranks"
    return ""
