"""How much the device may hold changes no bit: each model of the matrix at budgets down to the smallest."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from shoal import Plan
from shoal.errors import BudgetExceeded
from tests.parity.cases import CASES, DEEP, Trace, engine, train
from tests.parity.covering import in_turn, thinned

STEPS, CHUNK = 4, 4096


def run(case: str, precision: str, memory: dict | None, recompute: str = "none") -> tuple[Trace, int]:
    """What it did, and the most of the device that was taken."""
    exchange = {"name": "allreduce", "chunk_bytes": CHUNK}
    running = engine(case, precision, 1, plan=Plan(memory=memory, recompute=recompute, exchange=exchange))
    try:
        trace = train(running, CASES[case].data(), STEPS)
        return trace, running.parts.tier.most_in_all if running.parts.tier is not None else 0
    finally:
        running.close()


PRECISIONS = ["fp32", "bf16"]
SOME = [case for case in CASES if case not in DEEP or case == "moe-deep"]  # of the others deep ones are more blocks


@pytest.mark.parametrize(("case", "precision"), thinned(list(product(CASES, PRECISIONS)), in_turn(SOME, PRECISIONS)))
def test_every_budget_gives_the_same_bits(case, precision):
    (whole, _), (free, most) = run(case, precision, None), run(case, precision, {})
    with pytest.raises(BudgetExceeded) as refusal:
        run(case, precision, {"device": 1})
    least = refusal.value.needed
    found = [free]
    for budget in sorted({least, (least + most) // 2, most}):
        trace, taken = run(case, precision, {"device": budget})
        assert taken <= budget
        found.append(trace)
    for trace in found:
        assert trace.losses == whole.losses and trace.evaluation == whole.evaluation
        assert trace.norms == pytest.approx(whole.norms, nan_ok=True, rel=0)
        for mine, theirs in (
            (trace.gradients, whole.gradients),
            (trace.weights, whole.weights),
            (trace.buffers, whole.buffers),
        ):
            assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
