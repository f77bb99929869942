"""What a step was spent on, by hand-worked spans."""

from __future__ import annotations

import pytest

from shoal.comm import Span
from shoal.comm.ledger import NOBODY, Peers, Phase
from shoal.report.terms import Call, Told, spent, together

pytestmark = pytest.mark.fast

DP, TP, PP = Peers("dp", 0, 2, 2), Peers("tp", 0, 1, 2), Peers("pp0-forward", 0, 2, 2)


def span(lane: str, name: str, start: float, stop: float, peers: Peers = NOBODY, aside: bool = False) -> Span:
    operation = {"comm": "all_reduce"}.get(lane, "") if peers != NOBODY else ""
    phase: Phase = "wait" if lane == "wait" else "compute"
    return Span(7, lane, name, 100 + start, stop - start, 1000 if operation else 0, phase, operation, peers, aside)


def test_a_moment_belongs_to_the_innermost_span_and_a_wait_to_what_is_waited_for() -> None:
    told = spent(
        [
            span("compute", "load", 0, 1),
            span("compute", "forward", 1, 5),
            span("comm", "tokens", 2, 3, TP),  # inside of the forward: no computing
            span("wait", "weights", 3.5, 4),  # while nothing is sent: they come from the host
            span("compute", "backward", 5, 9),
            span("comm", "gradients 0", 6, 8, DP, aside=True),  # hidden
            span("comm", "gradients 1", 8.5, 11, DP, aside=True),  # a half second of it
            span("wait", "exchange", 9, 11),
            span("comm", "ballot", 11, 11.5, DP),  # ranks agree
            span("compute", "optimizer", 11.5, 13),
            span("wait", "update", 12, 12.5),
            span("queue", "gradients 1", 8, 8.5),
        ],
        14.0,
        "one",
    )
    waits = {"parts": 1, "offload": 0.5, "copies": 2}
    assert told.terms == pytest.approx(
        {"data": 1, "forward": 2.5, "backward": 4, "optimizer": 1.5, "other": 1.5, **waits}
    )
    assert told.seconds == 14.0 == pytest.approx(sum(told.terms.values()))
    assert told.sent == {"parts": 1000, "copies": 2000}
    assert told.calls[Call("all_reduce", "copies", 0, 2, 2, 1000)] == (3, 0.5)  # the least, as they were beside
    assert Told.from_wire(told.to_wire()) == told


def test_waits_of_a_pipeline_are_one_term_whatever_else_is_sent() -> None:
    told = spent(
        [
            span("stage", "F0(0)", 0, 2),
            span("compute", "forward", 0.1, 1.9),
            span("wait", "stage 1", 2, 3),
            span("comm", "gradients 0", 2, 5, DP, aside=True),
            span("comm", "backward", 2, 3, PP, aside=True),
            span("stage", "I0(0)", 3, 4),
            span("stage", "W0(0)", 4, 5),
            span("wait", "pipeline", 5, 6),
        ],
        6.0,
        "one",
    )
    assert told.terms == pytest.approx({"forward": 2, "bubble": 2, "backward": 2})


def test_a_wait_for_several_lanes_is_shared_by_what_they_do() -> None:
    told = spent(
        [
            span("wait", "exchange", 0, 4),
            span("comm", "gradients 0", 0, 3, DP, aside=True),
            span("comm", "tokens", 3, 4, TP, aside=True),
        ],
        4.0,
        "one",
    )
    assert told.terms == pytest.approx({"copies": 3, "parts": 1})


def test_all_ranks_together_say_what_the_busiest_did_and_what_calls_take_where_all_have_come() -> None:
    call, across = Call("all_reduce", "copies", 0, 1, 2, 8), Call("all_reduce", "copies", 1, 2, 2, 8)
    ranks = [
        Told("a", 10.0, {"forward": 2.0, "copies": 8.0}, {"copies": 8}, {call: (3, 2.6)}),
        Told("a", 10.0, {"forward": 9.0, "copies": 1.0}, {"copies": 16}, {call: (3, 0.2), across: (1, 5.0)}),
        Told("b", 10.0, {"forward": 4.0, "bubble": 6.0}, {}, {across: (1, 4.0)}),
    ]
    found = together(5, ranks, 2)
    assert (found.step, found.world, found.hosts, found.rank) == (5, 3, ["a", "b"], 1)
    assert found.terms == {"forward": 9.0, "copies": 1.0} and found.sent == {"copies": 16}
    assert found.means == pytest.approx({"forward": 5, "copies": 3, "bubble": 2})
    assert [(row["across"], row["calls"], row["seconds"]) for row in found.calls] == [(True, 1, 4.0), (False, 3, 0.2)]
