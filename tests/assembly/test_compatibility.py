"""The table of refusals is what the documentation shows of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal import Engine, Plan, UserError
from shoal.assembly.compatibility import check_exchange
from shoal.comm.simulation import simulate_world
from shoal.exchange.named import ALGORITHMS

pytestmark = pytest.mark.fast

DOCS = Path(__file__).resolve().parents[2] / "docs" / "communication.md"
PLANS = {
    "`zero` 1": Plan(dp=2, zero=1),
    "`zero` 2, 3": Plan(dp=2, zero=2),
    "`memory`": Plan(dp=2, memory={}),
    "`cp`": Plan(dp=2, cp=2),
    "`tp`": Plan(dp=2, tp=2),
    "`ep`": Plan(dp=2, ep=2),
    "`pp`": Plan(dp=2, pp=2),
}


def goes_with(name: str, plan: Plan) -> bool:
    try:
        check_exchange(Plan(**{**plan.to_dict(), "exchange": name}), "whole")
    except UserError:
        return False
    return True


def matrix() -> str:
    """Each algorithm, as it is without parameters, against what else a plan may ask for."""
    rows = [["exchange", *PLANS], ["---"] * (1 + len(PLANS))]
    rows += [[name, *("yes" if goes_with(name, plan) else "" for plan in PLANS.values())] for name in ALGORITHMS]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def test_the_matrix_in_the_documentation_is_that_of_the_table() -> None:
    assert matrix() in DOCS.read_text(), f"docs/communication.md should have\n{matrix()}"


def test_the_first_conflict_is_told_with_its_reason() -> None:
    with pytest.raises(UserError, match=r'"local_sgd" does not go with plan.zero = 1: its replicas train apart'):
        check_exchange(Plan(dp=2, zero=1, tp=2, exchange="local_sgd"), "whole")


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, max_norm=0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids)


def renormed(world: Any, **options: Any) -> str:
    def loss(model: nn.Module, mb: Any) -> tuple[torch.Tensor, int]:
        return model(mb["ids"]).sum(), 1

    made = {"global_batch": 2, "world": world, "plan": Plan(dp=world.size), **options}
    try:
        engine = Engine(Renormed, loss, partial(torch.optim.SGD, lr=0.1), **made)
    except UserError as error:
        return str(error)
    engine.step(next(engine.batches([{"ids": torch.tensor(3)}] * 2)))
    engine.close()
    return "trains"


def test_weights_that_a_forward_changes_are_refused_where_that_would_be_lost() -> None:
    assert simulate_world(1, renormed) == ["trains"]
    for size, options in ((2, {}), (1, {"precision": "bf16"}), (1, {"plan": Plan(memory={})})):
        for said in simulate_world(size, partial(renormed, **options)):
            assert said.startswith("words has max_norm: a forward changes rows of the weight")
