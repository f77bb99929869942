"""`Engine.generate`: the same text under every plan, after training, with weights as they are now."""

from __future__ import annotations

import pytest
import torch

from shoal.engine import Engine
from shoal.plan import Plan
from tests.parity.cases import engine, text
from tests.pool import run_ranks

PROMPT = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])


def written(running: Engine) -> list[list[list[int]]]:
    """Likeliest and drawn tokens after two steps; then a step more, which what was written must not disturb."""
    for batch in running.batches(text(), steps=2):
        running.step(batch)
    likeliest = running.generate(PROMPT, 6, temperature=0)
    drawn = [running.generate(PROMPT, 6, temperature=2.0, top_k=9, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    for batch in running.batches(text(), steps=1):
        running.step(batch)
    after = running.generate(PROMPT, 6, temperature=0)
    running.close()
    return [each.tolist() for each in (likeliest, *drawn, after)]


def on_a_rank(world, case: str, plan: Plan) -> list[list[list[int]]]:
    return written(engine(case, "fp64", 2, world=world, plan=plan))


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        ("gpt", Plan(dp=2, zero=3)),
        ("gpt", Plan(tp=2)),
        ("gpt", Plan(pp=2)),
        ("lstm", Plan(pp=2, schedule="2bw")),
        ("gpt", Plan(cp=2)),
        ("gpt", Plan(dp=2, memory={})),
    ],
    ids=["zero3", "tp", "pp", "2bw", "cp", "memory"],
)
def test_all_ranks_write_what_one_process_writes(case, plan):
    first, second = run_ranks(on_a_rank, 2, case, plan)
    assert first == second
    if plan.schedule != "2bw":  # which trains with delayed updates
        assert first == written(engine(case, "fp64", 2))
