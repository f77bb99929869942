"""Models that people have, under plans: each row of docs/models.md is what it says."""

from __future__ import annotations

from itertools import product

import pytest

from tests.parity.covering import in_turn, thinned
from tests.zoo.page import PAGE, expected, printed
from tests.zoo.runs import PLANS, ZOO, outcome


@pytest.mark.parametrize(("name", "column"), thinned(list(product(ZOO, PLANS)), in_turn(list(ZOO), list(PLANS))))
def test_a_model_under_a_plan_equals_plain_torch_or_is_refused_by_name(name, column):
    assert outcome(name, column) == expected()[name][column]


def test_the_page_is_printed_from_the_outcomes():
    assert PAGE.read_text(encoding="utf-8") == printed(expected())
