"""Orders of work that no row of the engine comes to, or that a later wait hides there (`orders.py`): with these, each
wait, event, `record_stream` and pinned allocation that is removed is reported (`make mutate-device`)."""

from __future__ import annotations

from functools import cache

import pytest

from tests.device import orders, uses
from tests.device.simulator import simulate_ranks, why_not

simulated = pytest.mark.skipif(bool(why_not()), reason=why_not())
CASES = {
    "products_while_tokens_travel": 2,
    "a_gradient_that_is_copied_to_travel": 2,
    "given_up_before_it_is_asked_for": 1,
    "spans": 1,
    "recorded": 1,
    "saved_aside": 1,
}


@cache
def on_the_cpu(name: str) -> list[list[float]]:
    return [run.result for run in simulate_ranks(uses.used, CASES[name], "cpu", getattr(orders, name))]


@simulated
@pytest.mark.parametrize("name", CASES)
def test_it_is_as_on_the_cpu_and_nothing_is_unordered(name):
    runs = simulate_ranks(uses.used, CASES[name], "cuda", getattr(orders, name))
    assert [run.trace.defects for run in runs] == [[]] * len(runs)
    for run, reference in zip(runs, on_the_cpu(name), strict=True):
        assert run.result == pytest.approx(reference, rel=1e-4)
