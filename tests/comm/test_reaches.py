"""How collectives are timed among ranks that compute between them."""

from __future__ import annotations

import time

import pytest
import torch

from shoal.comm import reaches
from shoal.device import CPU


class Two:
    """A group of two ranks whose other one does the same."""

    size = 2

    def barrier(self) -> None:
        pass

    def all_reduce(self, tensor: torch.Tensor, *of: object, **named: object) -> torch.Tensor:
        return tensor


def test_a_call_is_timed_between_computing_and_with_tensors_that_no_cache_has(monkeypatch):
    monkeypatch.setattr(reaches, "BETWEEN", 1e-4)
    seen: list[int] = []

    def call(tensor: torch.Tensor) -> None:
        seen.append(tensor.data_ptr())
        time.sleep(5e-3)

    rows = (64, 1e-4), (4096, 2e-4)
    timed = reaches._between(Two(), CPU)(call, rows)
    assert [nbytes for nbytes, _ in timed] == [64, 4096]
    assert [seconds for _, seconds in timed] == pytest.approx([5e-3, 5e-3], rel=0.5)
    assert len(set(seen)) == 2 * reaches.TURNS

    seen.clear()
    slow = (4096, 2 * reaches.ENOUGH)
    assert reaches._between(Two(), CPU)(call, (slow, slow)) == [slow, slow] and not seen


def test_a_call_is_not_said_to_be_quicker_than_alone(monkeypatch):
    monkeypatch.setattr(reaches, "BETWEEN", 1e-4)
    (timed,) = reaches._between(Two(), CPU)(lambda tensor: None, ((64, 0.03),))
    assert timed == (64, 0.03)
