"""Exact sums: equal to fractions, whatever the order and the grouping."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.chunks import exact
from shoal.chunks.exact import LOWEST, exact_sum, value_of

squares = st.floats(min_value=2.0 ** (LOWEST + 60), max_value=1e300) | st.just(0.0) | st.floats(1e-12, 1e6)


@given(st.lists(squares, min_size=1, max_size=40), st.integers(1, 7), st.randoms(use_true_random=False))
def test_order_and_grouping_cannot_be_seen(values: list[float], groups: int, draw: random.Random):
    row = exact_sum(torch.tensor(values, dtype=torch.float64))
    draw.shuffle(values)
    parts = [
        exact_sum(torch.tensor(values[start::groups], dtype=torch.float64)) for start in range(min(groups, len(values)))
    ]
    assert torch.equal(torch.stack(parts).sum(0), row)
    whole = sum((Fraction(value) for value in values), Fraction(0))
    assert float(value_of(row)) == pytest.approx(float(whole), rel=1e-15)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(wrong: float):
    assert not value_of(
        exact_sum(torch.tensor([1.0, wrong], dtype=torch.float64)) + exact_sum(torch.tensor([2.0]).double())
    ).isfinite()


def test_sums_of_fake_tensors_leave_nothing_behind():
    exact._made.clear()
    with FakeTensorMode():
        assert value_of(exact_sum(torch.ones(3, dtype=torch.float64))).shape == ()
    assert float(value_of(exact_sum(torch.ones(3, dtype=torch.float64)))) == 3
