"""What operations take beside their work."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from shoal.device import CPU, measure_cold, measure_operations, measure_shortest, operations


def test_an_operation_of_a_model_takes_longer_than_one_alone():
    """Modules, autograd and parameters' gradients come with it; nothing is drawn that a run would draw."""
    before = torch.get_rng_state()
    alone, in_a_model = measure_shortest(CPU), measure_operations(CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 < alone < in_a_model < 1e-2


def test_what_comes_once_is_the_median_beside_the_shortest_of_what_is_repeated(monkeypatch: pytest.MonkeyPatch):
    before, trials = torch.get_rng_state(), operations.COLD_TRIALS
    assert measure_cold() >= 1
    assert torch.equal(torch.get_rng_state(), before)
    took = [9.0, *[2.0] * (trials - 1), 1.0, *[3.0] * (trials - 2), 50.0, 0.5]  # the first one warms up
    readings = iter([reading for end, own in zip(accumulate(took), took, strict=True) for reading in (end - own, end)])
    monkeypatch.setattr(operations.time, "thread_time", lambda: next(readings))
    assert measure_cold() == 3.0
    readings = iter([reading for place in range(1 + 2 * trials) for reading in (place, place + 1)])
    assert measure_cold() == 1.0
