"""What an engine leaves behind with a plan is freed at once: it does not wait for a collection of garbage."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from tests.assembly.test_replan import PLANS, _steps, plan_of
from tests.parity.cases import CASES, engine
from tests.pool import run_ranks


def _left(world, case: str, old: dict[str, Any], new: dict[str, Any], directory: str) -> list[str]:
    """What is still there of a plan after it was left."""
    running = engine(case, "fp32", 1, world=world, plan=plan_of(old, directory))
    _steps(running, CASES[case].data(), 2)
    running.evaluate(CASES[case].data(), max_batches=1)
    gc.collect()
    gc.disable()
    try:
        parts: dict[str, Any] = {"optimizer": running.optimizer}
        parts |= {f"chunk {index}": chunk for index, chunk in enumerate(running.parts.chunks)}
        parts |= running.parameters
        there = {name: weakref.ref(part) for name, part in parts.items()}
        del parts
        running.replan(plan_of(new, directory))
        return [name for name, each in there.items() if each() is not None]
    finally:
        gc.enable()
        running.close()


@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        ("gpt-deep", "dp", "zero3"),
        ("gpt-deep", "zero3", "tp2"),
        ("gpt-deep", "pp2", "dp"),
        ("gpt-deep", "pp4-zbv", "zero3"),
        ("gpt-deep", "2bw", "zero1"),
        ("gpt-deep", "cp2", "host"),
        ("gpt-deep", "host", "dp"),
        ("gpt-deep", "disk", "recompute"),
        ("gpt-deep", "recompute", "local"),
        ("gpt-deep", "topk", "dp"),
        ("gpt", "compiled", "zero3"),
        ("moe-deep", "ep2", "pp2"),
        ("moe-deep", "pp2", "dp"),
    ],
)
def test_nothing_is_left_of_a_plan(tmp_path, case, old, new):
    for left in run_ranks(_left, 4, case, PLANS[old], PLANS[new], str(tmp_path)):
        assert not left
