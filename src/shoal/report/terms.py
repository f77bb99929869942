"""What a step was spent on, in the planner's terms: of each rank from the spans of its ledger, of all ranks together.

A moment of the trainer's thread belongs to the innermost span that is open then: communication inside a forward is no
computing. A wait for a lane belongs to what the lane does meanwhile. What goes on beside the trainer costs nothing
here.

    forward [ copies of weights come | products | parts: all-reduce | products ] backward [ ... ] wait [ exchange ]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from shoal.comm import Span
from shoal.planner.degrees import divided_by
from shoal.report.changes import TermsRecord

WORK = ("forward", "backward", "optimizer")
"""Kinds of work of a device; what a rank computes is "forward" and "backward"."""
WAITING = "bubble"
"""Waits for another stage, with the transfer of what it sends."""
AGREED = {"ballot", "norm", "counts", "stop?", "which weights", "buffers", "object", "result", "kinds", "trial"}
"""Purposes of calls in which ranks agree on a step: a part of "other"."""
CAUSES = {"update": "optimizer", "disk": "offload", "weights": "offload", "exchange": "offload", "pipeline": WAITING}
"""The terms of waits for a lane that does not communicate meanwhile, by purpose: it copies, or the optimizer works."""
BACKWARD = ("B", "I", "W")
"""Actions of a schedule that are backwards, or halves of one."""
MOST = 64
"""Rows of calls that a record has at most: those that took longest."""


class Call(NamedTuple):
    """What calls of a group have in common: those of one rank of it."""

    operation: str
    what: str
    first: int
    last: int
    ranks: int
    payload: int


class Told(NamedTuple):
    """What a rank tells of a step: its host, its seconds, those of each term, bytes that it handed to collectives by
    what ranks divide, and of each kind of call how many there were and what one took: the median, or, where it went on
    beside computing, the least, which is disturbed least."""

    host: str
    seconds: float
    terms: dict[str, float]
    sent: dict[str, int]
    calls: dict[Call, tuple[int, float]]

    def to_wire(self) -> list[Any]:
        calls = [[*call, *taken] for call, taken in self.calls.items()]
        return [self.host, self.seconds, list(self.terms.items()), list(self.sent.items()), calls]

    @classmethod
    def from_wire(cls, said: Sequence[Any]) -> Told:
        host, seconds, terms, sent, calls = said
        own = {Call(*row[:6]): (int(row[6]), float(row[7])) for row in calls}
        return cls(host, seconds, dict(map(tuple, terms)), dict(map(tuple, sent)), own)


def spent(spans: Sequence[Span], seconds: float, host: str) -> Told:
    """Reduces the spans of a rank's step on `host` that took `seconds`, which its terms make up: what no span says is
    "other"."""
    terms: dict[str, float] = {}
    beside = [span for span in spans if span.aside and span.lane == "comm"]
    own = [span for span in spans if not span.aside and span.lane in ("compute", "comm", "wait", "stage")]
    under_way: list[tuple[float, str]] = []
    for span in sorted(own, key=lambda span: (span.start, -span.seconds)):
        while under_way and under_way[-1][0] <= span.start:
            under_way.pop()
        length = span.seconds
        if under_way:
            stop, outer = under_way[-1]
            length = min(length, stop - span.start)  # lengths are of a finer clock than starts
            terms[outer] -= length
        parts = list(_terms_of(span, beside))
        for what, share in parts:
            terms[what] = terms.get(what, 0.0) + share * length
        under_way.append((span.start + length, parts[0][0]))
    terms["other"] = max(0.0, terms.get("other", 0.0) + seconds - sum(terms.values()))
    return Told(host, seconds, {what: max(0.0, each) for what, each in terms.items() if each}, *_calls(spans))


def _terms_of(span: Span, beside: Sequence[Span]) -> Iterator[tuple[str, float]]:
    """The terms that a span of the trainer's thread belongs to, with the share of each."""
    if span.lane == "comm":
        yield _of_call(span), 1.0
    elif span.lane == "compute":
        yield {"load": "data"}.get(span.name, span.name if span.name in WORK else "other"), 1.0
    elif span.lane == "stage":
        yield "backward" if span.name.startswith(BACKWARD) else "forward", 1.0
    elif span.name.startswith("stage "):
        yield WAITING, 1.0
    else:
        yield from _awaited(span, beside)


def _awaited(wait: Span, beside: Sequence[Span]) -> Iterator[tuple[str, float]]:
    """What a wait was for, by the communication that went on meanwhile."""
    stop = wait.start + wait.seconds
    sums: dict[str, float] = {}
    for span in beside:
        both = min(stop, span.start + span.seconds) - max(wait.start, span.start)
        if both > 0:
            sums[_of_call(span)] = sums.get(_of_call(span), 0.0) + both
    if wait.name == "pipeline" or not sums:
        yield CAUSES.get(wait.name, "other"), 1.0
        return
    whole = sum(sums.values())
    yield from ((what, each / whole) for what, each in sorted(sums.items(), key=lambda each: -each[1]))


def _of_call(span: Span) -> str:
    """The term of a call of a group, or of the coding of what it sends."""
    if _purpose(span) in AGREED:
        return "other"
    what = divided_by(span.peers.name) if span.operation else "copies"
    return WAITING if what == "stages" else what or "other"


def _purpose(span: Span) -> str:
    return span.name.rstrip("0123456789 ") or span.name


def _calls(spans: Sequence[Span]) -> tuple[dict[str, int], dict[Call, tuple[int, float]]]:
    """Bytes that were handed to collectives by what ranks divide, and all calls by kind."""
    sent: dict[str, int] = {}
    taken: dict[Call, list[float]] = {}
    beside: set[Call] = set()
    for span in spans:
        peers = span.peers
        if not span.operation or peers.size == 1 or span.operation in ("recv", "barrier"):
            continue  # a receive waits for its sender
        what = divided_by(peers.name)
        if what and _purpose(span) not in AGREED:
            sent[what] = sent.get(what, 0) + span.payload
        call = Call(span.operation, what, peers.first, peers.last, peers.size, span.payload)
        taken.setdefault(call, []).append(span.seconds)
        if span.aside:
            beside.add(call)
    one = {call: (min if call in beside else median)(seconds) for call, seconds in taken.items()}
    return sent, {call: (len(seconds), one[call]) for call, seconds in taken.items()}


def together(step: int, told: Sequence[Told], on_host: int) -> TermsRecord:
    """The record of a step of all ranks, `on_host` of them on each host. Its terms are those of the rank that works
    longest, for which the others wait. A call takes what it takes on the rank that comes last to it."""
    place = max(range(len(told)), key=lambda each: (sum(told[each].terms.get(what, 0.0) for what in WORK), -each))
    names = sorted({what for each in told for what in each.terms})
    calls: dict[Call, tuple[int, float]] = {}
    for each in told:
        for call, (number, seconds) in each.calls.items():
            calls[call] = number, min(seconds, calls.get(call, (0, seconds))[1])
    return TermsRecord(
        step=step,
        world=len(told),
        hosts=sorted({each.host for each in told}),
        rank=place,
        seconds=told[place].seconds,
        terms=told[place].terms,
        means={what: sum(each.terms.get(what, 0.0) for each in told) / len(told) for what in names},
        sent=told[place].sent,
        calls=_rows(calls, on_host),
    )


def _rows(calls: Mapping[Call, tuple[int, float]], on_host: int) -> list[dict[str, Any]]:
    """One row for calls that are alike but for their ranks."""
    alike: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for call, taken in calls.items():
        across = call.first // on_host != call.last // on_host
        alike.setdefault((call.operation, call.what, call.ranks, across, call.payload), []).append(taken)
    rows = [
        {
            "operation": operation,
            "what": what,
            "ranks": ranks,
            "across": across,
            "payload": payload,
            "calls": max(number for number, _ in taken),
            "seconds": median(seconds for _, seconds in taken),
        }
        for (operation, what, ranks, across, payload), taken in alike.items()
    ]
    return sorted(rows, key=lambda row: -row["calls"] * row["seconds"])[:MOST]
