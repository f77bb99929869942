"""A budget of the device's memory on the simulated accelerator: what a refusal asks for, and what is then taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from shoal import Engine, Plan
from shoal.device import asked_for
from shoal.errors import BudgetExceeded
from tests.device.engines import world_of
from tests.device.simulator import Rank
from tests.parity.cases import CASES, engine

STEPS = 4
"""The last one of an epoch has fewer microbatches: a pass of another kind."""
RESULT = 1024
"""Bytes beside what the first step needs: the numbers of the step before, which nobody has read."""


def needed(rank: Rank, where: str, case: str, plan: dict[str, Any]) -> int:
    """The budget that the refusal of one of a byte asks for."""
    try:
        next(losses(_engine(rank, where, case, plan, 1), case))
    except BudgetExceeded as refusal:
        return refusal.needed
    raise AssertionError("a byte was enough")


def taken(rank: Rank, where: str, case: str, plan: dict[str, Any], device: int) -> tuple[list[float], int]:
    """Losses, and the most bytes that tensors of the device took in a step."""
    with watched() as seen:
        running = _engine(rank, where, case, plan, device)
        seen.clear()
        found = list(losses(running, case))
        seen.append(asked_for(running.device))
        running.close()
    return found, max(most for _, most in filter(None, seen))


def losses(running: Engine, case: str) -> Iterator[float]:
    for batch in running.batches(CASES[case].data(), steps=STEPS):
        yield running.step(batch).loss


def _engine(rank: Rank, where: str, case: str, plan: dict[str, Any], device: int) -> Engine:
    memory = {"chunk": "4KiB", **plan.get("memory", {}), "device": device}
    return engine(case, "fp32", 1, world=world_of(rank, where), plan=Plan(**{**plan, "memory": memory}))


@contextmanager
def watched() -> Iterator[list[tuple[int, int] | None]]:
    """What the allocator says each time before it forgets."""
    seen: list[tuple[int, int] | None] = []

    def forget(device: torch.device) -> tuple[int, int] | None:
        seen.append(asked_for(device))
        torch.accelerator.reset_peak_memory_stats(device)
        return seen[-1]

    with patch("shoal.chunks.tier.begin_most_asked_for", forget):
        yield seen
