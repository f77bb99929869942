"""Models that people have, under plans: each row of docs/models.md is what it says."""

from __future__ import annotations

from itertools import product

import pytest

from tests.parity.covering import in_turn, thinned
from tests.zoo.page import PAGE, expected, printed
from tests.zoo.runs import PLANS, PLANS_OF_READY, ZOO, outcome, outcome_of_ready


@pytest.mark.parametrize(("name", "column"), thinned(list(product(ZOO, PLANS)), in_turn(list(ZOO), list(PLANS))))
def test_a_model_under_a_plan_equals_plain_torch_or_is_refused_by_name(name, column):
    assert outcome(name, column) == expected()[name][column]


@pytest.mark.parametrize(
    ("name", "column"), thinned(list(product(ZOO, PLANS_OF_READY)), [("bert", "tp 2"), ("vit", "pp 2, dp 2")])
)
def test_a_ready_model_under_a_plan_equals_it_on_one_rank(name, column):
    """It goes ways that none goes which is made on fake tensors."""
    assert outcome_of_ready(name, column) == "equal"


def test_the_page_is_printed_from_the_outcomes():
    assert PAGE.read_text(encoding="utf-8") == printed(expected())
