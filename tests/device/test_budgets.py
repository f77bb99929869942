"""Budgets of the device's memory: the remedy of a refusal does, and what a step takes stays within it."""

from __future__ import annotations

from typing import Any

import pytest

from shoal import Plan
from tests.device import budgets
from tests.device.simulator import simulate_ranks, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("gpt", {}),
    "recompute": ("gpt", {"recompute": "full"}),
    "deep": ("gpt-deep", {}),
    "experts": ("moe", {}),
    "deferred": ("gpt", {"memory": {"update": "deferred", "activations": 0.5}}),
    "zero3": ("gpt", {"dp": 2, "zero": 3}),
    "stages": ("gpt", {"pp": 2}),
}
"""All but one are for the matrix."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "experts" else pytest.mark.matrix) for name in PLANS]
)
def test_what_a_refusal_asks_for_is_enough_and_is_kept(name):
    case, plan = PLANS[name]
    size = Plan(**{**plan, "memory": None}).size
    least = max(run.result for run in simulate_ranks(budgets.needed, size, "cuda", case, plan))
    free = simulate_ranks(budgets.taken, size, "cuda", case, plan, 1 << 30)
    runs = simulate_ranks(budgets.taken, size, "cuda", case, plan, least)
    for run, whole in zip(runs, free, strict=True):
        assert run.trace.defects == []
        assert run.result[0] == pytest.approx(whole.result[0], rel=1e-5), "what has room is updated by another kernel"
        assert run.result[1] <= least + budgets.RESULT < whole.result[1] + budgets.RESULT
