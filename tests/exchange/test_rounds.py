"""Which chunks go out with which backward of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.exchange.rounds import Round, rounds_of

pytestmark = pytest.mark.fast


def chunk(*stages: int, borrows: bool = True) -> Any:
    return SimpleNamespace(borrows=borrows, spec=SimpleNamespace(stages=stages))


def told(rounds: list[Round]) -> list[str]:
    """The chunks of each round: those that begin with <, those that are complete with >."""
    return [
        " ".join("<" * (each in now.first) + str(each) + ">" * (each in now.last) for each in now.order)
        for now in rounds
    ]


SEVERAL = [chunk(2), chunk(0, 2), chunk(0), chunk()]
"""Of one stage, of both stages of a rank, of the other one, and what other ranks have too."""
KEPT = [chunk(0), chunk(2, borrows=False), chunk(borrows=False)]


@pytest.mark.parametrize(
    ("chunks", "backwards", "expected"),
    [
        ([chunk(), chunk()], [None], ["<0> <1>"]),
        ([chunk(), chunk()], [None, None, None], ["<0 <1", "0 1", "0> 1>"]),
        (SEVERAL, [2, 2, 0, 0], ["<0 <1 <3", "0> 1 3", "1 <2 3", "1> 2> 3>"]),
        (SEVERAL, [2, 0, 2, 0], ["<0 <1 <3", "1 <2 3", "0> 1 3", "1> 2> 3>"]),
        (SEVERAL, [None] * 2, ["<0 <1 <2 <3", "0> 1> 2> 3>"]),
        (KEPT, [2, 2, 0], ["", "", "<0> <1> <2>"]),
        (KEPT, [0, 2], ["<0>", "<1> <2>"]),
    ],
)
def test_a_backward_is_a_round_of_the_chunks_that_it_adds_to(chunks, backwards, expected):
    assert told(rounds_of(chunks, backwards)) == expected
