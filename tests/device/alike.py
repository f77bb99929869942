"""Uses of an engine that give on the simulated accelerator what they give on the CPU, with nothing unordered."""

from __future__ import annotations

from functools import cache

import pytest

from tests.device import uses
from tests.device.simulator import simulate_ranks


@cache
def on_the_cpu(use, size: int) -> list[list[float]]:
    return [run.result for run in simulate_ranks(uses.used, size, "cpu", use, timeout=120)]


def check_as_on_the_cpu(use, size: int, mode) -> None:
    runs = simulate_ranks(uses.used, size, "cuda", use, mode=mode, patience=60, timeout=120)
    assert [run.trace.defects for run in runs] == [[]] * size
    for run, reference in zip(runs, on_the_cpu(use, size), strict=True):
        assert run.result == pytest.approx(reference, rel=1e-3, abs=1e-4)
