"""What no row of the engine comes to: orders of work (`orders.py`), with which each wait, event, `record_stream` and
pinned allocation that is removed is reported (`make mutate-device`), and branches (`branches.py`)."""

from __future__ import annotations

from functools import cache

import pytest

from tests.device import branches, orders, uses
from tests.device.simulator import simulate_ranks, why_not

simulated = pytest.mark.skipif(bool(why_not()), reason=why_not())
CASES = {
    orders: {
        "products_while_tokens_travel": 2,
        "a_gradient_that_is_copied_to_travel": 2,
        "given_up_before_it_is_asked_for": 1,
        "spans": 1,
        "recorded": 1,
        "saved_aside": 1,
    },
    branches: {
        "exchanged_with_error_feedback": 2,
        "batch_statistics": 2,
        "goes_on_after_an_error": 1,
        "a_job": 1,
        "stages_by_time": 1,
        "transports": 2,
        "hook_of_ddp": 2,
    },
}
ROWS = {name: (getattr(file, name), size) for file, sizes in CASES.items() for name, size in sizes.items()}


@cache
def on_the_cpu(name: str) -> list[list[float]]:
    use, size = ROWS[name]
    return [run.result for run in simulate_ranks(uses.used, size, "cpu", use)]


@simulated
@pytest.mark.parametrize("name", ROWS)
def test_it_is_as_on_the_cpu_and_nothing_is_unordered(name):
    use, size = ROWS[name]
    runs = simulate_ranks(uses.used, size, "cuda", use)
    assert [run.trace.defects for run in runs] == [[]] * len(runs)
    for run, reference in zip(runs, on_the_cpu(name), strict=True):
        assert run.result == pytest.approx(reference, rel=1e-4)


@simulated
def test_the_room_of_devices_answers():
    (run,) = simulate_ranks(uses.used, 1, "cuda", branches.answers)
    print(run.result)
