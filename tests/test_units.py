from __future__ import annotations

import math

import pytest

from shoal import units
from shoal.plan import nbytes

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1.00k"),
        (12_345, "12.3k"),
        (999_499, "999k"),
        (999_500, "1.00M"),
        (4_560_000, "4.56M"),
        (0.25, "0.25"),
        (math.nan, "nan"),
        (-12_345, "-12.3k"),
        (2e18, "2000P"),
    ],
)
def test_counts(value: float, text: str) -> None:
    assert units.count(value) == text


@pytest.mark.parametrize(
    "value, text", [(0, "0 B"), (512, "512 B"), (1000, "0.98 KiB"), (1536, "1.50 KiB"), (139 * 2**30, "139 GiB")]
)
def test_sizes(value: float, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize("value", [0.3, 512, 1001, 1536, 12_345, 170_241, 999 * 1024 + 1, 3**20])
def test_a_budget_of_what_is_said_to_be_enough_is(value: float) -> None:
    assert value <= nbytes(units.enough(value), "budget") <= 1.01 * value + 11


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0123, "12.3 ms"),
        (0.9996, "1.0 s"),
        (4.25, "4.2 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.7, "1 h 00 min"),
        (12_000, "3 h 20 min"),
        (86_400 * 2 + 4 * 3600, "2 d 04 h"),
        (math.inf, "?"),
    ],
)
def test_durations(value: float, text: str) -> None:
    assert units.duration(value) == text


def test_rates() -> None:
    assert units.flops_rate(1.9e11) == "190 GFLOP/s"
