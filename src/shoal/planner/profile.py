"""What a model does with one row, part by part, and how each quantity falls with the degrees: from a few traces of two
ranks beside the one of a single rank (see `trace`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Literal

from shoal.comm.ledger import Traffic
from shoal.errors import UserError
from shoal.planner.buffers import why_not_kept
from shoal.planner.degrees import Spread, Ways, traced_as
from shoal.planner.positions import Positions, tokens_of
from shoal.planner.prepare import Subject
from shoal.planner.temporaries import Lives
from shoal.planner.trace import Seen, Statistics, Trace, trace

WAYS = ("parts", "tokens", "ring", "experts")
NOT_ASKED = "not asked for"
"""Why a model is not divided in a way that was not traced."""


@dataclass(frozen=True)
class Cut:
    """A quantity, and the share of it that ranks divide, by what they divide ("parts", "tokens", "ring", "experts"). A
    share below 0 is of what each rank has more than undivided: half of it, however many they are, and of what a ring
    adds as much again for each two of its ranks.

    `kind`: of a quantity that is divided in two ways, what one way leaves beside an even share of each rank, or adds,
    the other divides too ("data": bytes and operations of rows; but ranks that divide matrices each have all that
    experts add), or does not ("calls"). Of "elements" of parameters each way divides what the others leave.
    """

    value: float
    shares: Mapping[str, float]
    kind: Literal["elements", "data", "calls"] = "elements"

    def on(self, spread: Spread) -> float:
        """What one of the ranks has."""
        other = "tokens" if spread.ring and "ring" in self.shares else "ring"
        evenly = of_tokens = self.value
        beside = 0.0
        for what, share in ((each, self.shares[each]) for each in WAYS if each in self.shares):
            degree = 1 if what == other else spread.tokens if what == "ring" else getattr(spread, what)
            left = 1 - share + share / degree
            if share < 0 and degree > 1:
                left = 1 - share / 2 * (degree / 2 if what == "ring" else 1)
            routes = self.kind == "data" and what == "experts"  # and divides no rows
            even = left if self.kind == "elements" else min(left, 1.0 if routes or self.kind == "calls" else 1 / degree)
            beside = beside * even + (left - even) * (of_tokens if routes else evenly)
            evenly, of_tokens = evenly * even, of_tokens * (even if what != "parts" else 1.0)
        return evenly + beside


@dataclass(frozen=True)
class Message:
    """A collective of each forward and, `again` times as much, of each backward, of the ranks that divide `what`.
    `repeated`: the share that a block sends again which is computed again."""

    what: str
    operation: str
    calls: float
    payload: float
    again: float
    repeated: float = 1.0


@dataclass(frozen=True)
class PartProfile:
    """One part of a model. Quantities of one row, but `weights`, `trained`, `experts` and `largest` (elements of
    parameters, of stacked experts that are trained, of the largest parameter), `calls` and `packed`, which do not
    depend on the rows. `boundary`: bytes of its inputs; `operands`: bytes that products and attention read and write;
    `spared`: the share of products that backward does not need again, as they come after the last tensor that it asks
    for; `multiplied`, `tensors`: number of products and of parameters that are trained, which depend on no degree;
    `results`, `attended`, `convolved`: bytes of the results of matrix products, attention and convolutions;
    `convolutions`: those of `products`; `fused`, `kernels`: `touched` and `calls` where the part is compiled (see
    fusion); `packed`: tensors that it keeps for backward."""

    name: str
    is_block: bool
    kind: str
    products: Cut
    attention: Cut
    touched: Cut
    calls: Cut
    saved: Cut
    results: Cut
    boundary: Cut
    weights: Cut
    trained: Cut
    experts: Cut
    messages: tuple[Message, ...]
    operands: Cut = field(default_factory=lambda: Cut(0.0, {}))
    spared: float = 0.0
    multiplied: int = 0
    fused: Cut = field(default_factory=lambda: Cut(0.0, {}))
    kernels: Cut = field(default_factory=lambda: Cut(0.0, {}))
    tensors: int = 0
    largest: Cut = field(default_factory=lambda: Cut(0.0, {}))
    packed: Cut = field(default_factory=lambda: Cut(0.0, {}))
    convolutions: Cut = field(default_factory=lambda: Cut(0.0, {}))
    attended: Cut = field(default_factory=lambda: Cut(0.0, {}))
    convolved: Cut = field(default_factory=lambda: Cut(0.0, {}))


@dataclass(frozen=True)
class Profile:
    """A model: its parts in order; what of one row lives beside what backward keeps; elements of all its parameters,
    where tied ones count once; for each way to divide it why it cannot be divided so ("" where it can); why replicas
    cannot keep its buffers, by what they divide (see buffers); and how many numbers BatchNorm's running statistics are,
    which replicas merge. `tied`: elements that parts share, all but once, `tied_trained`: those of them that are
    trained; `tokens`: of a row, `positions`: tables of learned ones; `num_experts`: what ranks that share experts
    have to divide, 0 without experts."""

    parts: tuple[PartProfile, ...]
    lives: Lives[Cut]
    parameters: int
    refused: Mapping[str, str]
    buffers: Mapping[str, str] = field(default_factory=dict)
    statistics: Statistics = field(default_factory=Statistics)
    tied: Cut = field(default_factory=lambda: Cut(0.0, {}))
    tied_trained: Cut = field(default_factory=lambda: Cut(0.0, {}))
    tokens: int = 0
    positions: tuple[Positions, ...] = ()
    num_experts: int = 0

    @property
    def blocks(self) -> int:
        """Number of repeated blocks."""
        return sum(part.is_block for part in self.parts)


QUANTITIES = (
    "products",
    "attention",
    "touched",
    "calls",
    "saved",
    "results",
    "given",
    "operands",
    "fused",
    "kernels",
    "packed",
    "convolutions",
    "attended",
    "convolved",
)
COUNTED = ("calls", "kernels", "packed")
"""Those of them that do not depend on rows."""


def profile(subject: Subject, ways: Ways) -> Profile:
    """Traces the model of `subject`, of whose own plan the placements matter, with one row; `ways`: how it may be
    divided. Raises UserError for a model that cannot be run."""
    base = replace(subject, microbatch=1, rank=0)
    alone = trace(replace(base, plan=type(subject.plan)()))
    halves: dict[str, Divided] = {}
    refused: dict[str, str] = {}
    for what in WAYS:
        refused[what] = "" if what in ways else NOT_ASKED
        for ranks in ways.get(what, ()):
            try:
                halves[what] = _divided(what, ranks, base, alone)
            except UserError as error:
                refused[what] = refused[what] or str(error)
            else:
                refused[what] = ""
                break
    parts = [_part(place, alone, halves) for place in range(len(alone.parts))]

    def whole(name: str) -> Cut:
        of = attrgetter(name)
        value = of(alone)
        return Cut(value, {what: each.divided(value, of(each.trace)) for what, each in halves.items()})

    whys = why_not_kept(base)
    lives = Lives(*(whole(f"lives.{name}") for name in Lives._fields))
    tied = whole("tied"), whole("tied_trained")
    own = *tied, tokens_of(subject.sample), alone.positions, alone.num_experts
    return Profile(tuple(parts), lives, alone.whole, refused, whys, alone.statistics, *own)


def _divided(what: str, ranks: int, base: Subject, alone: Trace) -> Divided:
    """The trace of one of `ranks` that divide the model so. Raises UserError where they cannot."""
    found = trace(replace(base, plan=traced_as(what, ranks, base.plan.placements)))
    if [each.name for each in found.parts] != [each.name for each in alone.parts]:
        raise UserError("its parts are others then")
    return Divided(what, found, ranks)


def _part(place: int, alone: Trace, halves: Mapping[str, Divided]) -> PartProfile:
    seen = alone.parts[place]

    def cut(name: str) -> Cut:
        value = float(getattr(seen, name))
        shares = {what: each.share(value, getattr(each.trace.parts[place], name)) for what, each in halves.items()}
        return Cut(value, shares, "calls" if name in COUNTED else "data")

    def elements(name: str) -> Cut:
        value = float(getattr(alone, name)[place])
        shares = {what: each.divided(value, getattr(each.trace, name)[place]) for what, each in halves.items()}
        return Cut(value, shares)

    messages = [message for each in halves.values() for message in each.messages(place)]
    among = halves.get("experts")
    quantities = {name: cut(name) for name in QUANTITIES}
    return PartProfile(
        seen.name,
        seen.is_block,
        seen.kind,
        quantities["products"],
        quantities["attention"],
        quantities["touched"],
        quantities["calls"],
        quantities["saved"],
        quantities["results"],
        quantities["given"],
        elements("weights"),
        elements("trained"),
        Cut(float(among.ranks * among.trace.experts[place]) if among else 0.0, {"experts": 1.0}),
        tuple(messages),
        quantities["operands"],
        seen.last / seen.products if seen.products else 0.0,
        seen.multiplied,
        quantities["fused"],
        quantities["kernels"],
        alone.tensors[place],
        elements("largest"),
        *(quantities[name] for name in ("packed", "convolutions", "attended", "convolved")),
    )


@dataclass(frozen=True)
class Divided:
    """The trace of one of so many `ranks` that divide a model in the way `what`."""

    what: str
    trace: Trace
    ranks: int

    def share(self, whole: float, own: float) -> float:
        """Which share of a quantity ranks divide, where each has `own` of the `whole`, or more than that (see Cut)."""
        if own > whole > 0:
            return (4 / self.ranks if self.what == "ring" else 2) * (1 - own / whole)
        return min(1.0, self.ranks / (self.ranks - 1) * (1 - own / whole)) if whole else 0.0

    def divided(self, whole: float, own: float) -> float:
        """Share of a quantity that no rank has more of than undivided (see `share`)."""
        return max(0.0, self.share(whole, own))

    def messages(self, place: int) -> list[Message]:
        """The collectives of a part, as they would be between two ranks: of what ranks that share tokens send each has
        a part of a row, which a ring passes on to each of the others."""
        hops = self.ranks - 1 if self.what == "ring" else 1
        more = self.ranks / 2 / hops if self.what in ("tokens", "ring") else 1.0
        found = _messages(self.what, self.trace.parts[place], self.trace)
        return [replace(each, calls=each.calls / hops, payload=each.payload * more) for each in found]


def deepened(shallow: Profile, blocks: int, at: int) -> Profile:
    """The profile of a model with so many blocks, of which those that `shallow` lacks are like its block `at`."""
    places = [place for place, part in enumerate(shallow.parts) if part.is_block]
    model, more = places[at], blocks - len(places)
    again = shallow.parts[model]
    parts = [*shallow.parts[: model + 1], *[again] * more, *shallow.parts[model + 1 :]]
    return replace(shallow, parts=tuple(parts), parameters=shallow.parameters + more * round(again.weights.value))


def _messages(what: str, seen: Seen, traced: Trace) -> list[Message]:
    """The collectives of a part of the model that was traced among several ranks."""
    found = []
    for (operation, purpose), each in seen.sent.items():
        last = seen.sent_last.get((operation, purpose), Traffic()).payload
        repeated = 1 - last / each.payload if each.payload else 1.0
        found.append(Message(what, operation, each.calls, each.payload, _again(purpose, seen, traced), repeated))
    return found


def _again(purpose: str, seen: Seen, traced: Trace) -> float:
    """How many times as much a part's backward sends as its forward: a block by itself, since one whose input has no
    gradient sends less; parts that are no blocks together, as the first of them sends forward and the last backward.
    What parts send in backward alone is spread over all."""

    def forward(parts: Iterable[Seen]) -> int:
        return sum(each.payload for part in parts for (_, why), each in part.sent.items() if why == purpose)

    def backward(parts: Iterable[Seen]) -> int:
        return sum(part.returned.get(purpose, 0) for part in parts)

    others = [each for each in traced.parts if not each.is_block]
    own = [seen] if seen.is_block else others
    if not (once := forward(own)):
        return 0.0
    groups = [*([each] for each in traced.parts if each.is_block), others]
    alone = sum(backward(group) for group in groups if not forward(group))
    return backward(own) / once + alone / forward(traced.parts)
