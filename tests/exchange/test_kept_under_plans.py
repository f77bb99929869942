"""What error feedback keeps back of a model that is cut among ranks, and over a resume by other ranks: what was applied
and what is kept are the mean gradients."""

from __future__ import annotations

import math
import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal import Engine, Plan
from shoal.models import GPT, GPTConfig, MoEConfig, causal_lm
from tests.parity.cases import text
from tests.pool import run_ranks

KEEPING: dict[str, dict[str, Any]] = {
    "topk": {"name": "topk", "ratio": 0.05},
    "powersgd": {"name": "powersgd", "rank": 1, "start": 0, "min_compression": 1.0},
    "sign": {"name": "bytegrad", "codec": {"name": "sign", "row": 64}, "error_feedback": True},
}
Found = tuple[dict[str, Tensor], dict[str, Tensor]]
RATE = 2.0**-20
"""So small that weights, and with them gradients, stay as they are."""


def make(world: Any, option: Any, plan: dict[str, int], moe: bool) -> Engine:
    torch.set_num_threads(1)
    experts = MoEConfig(4, d_ff=16) if moe else None
    model = partial(GPT, GPTConfig(vocab_size=61, sequence=12, layers=2, d_model=16, heads=2, moe=experts))
    return Engine(
        model, causal_lm, partial(torch.optim.SGD, lr=RATE), Plan(**plan, exchange=option), global_batch=12,
        microbatch=1, precision="fp64", world=world,
    )  # fmt: skip


def moved(running: Engine, start: dict[str, Tensor]) -> dict[str, Tensor]:
    """What was applied since `start`, of this rank's parameters."""
    return {name: (start[name] - each.detach()) / RATE for name, each in running.optimizer.parameters.items()}


def copies(running: Engine) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in running.optimizer.parameters.items()}


def kept(running: Engine) -> dict[str, Tensor]:
    """What the replicas of this rank's parameters keep together; what waits on each of them alike counts once."""
    algorithm = running.parts.exchange
    algorithm.settle()
    found = {name: torch.zeros_like(each, dtype=torch.float64) for name, each in copies(running).items()}
    states = {name: each for name, each in algorithm.state().items() if "residual" in name or "waiting" in name}
    for chunk in algorithm.replica.chunks:
        group = algorithm.partners_of(chunk)
        for state in states.values():
            for name in (slot.name for slot in chunk.slots if slot.name in state.tensors):
                of_all = group.all_reduce(state.tensors[name].double().contiguous())
                found[name] += of_all / group.size if state.on_resize == "mean" else of_all
    return found


def account(world: Any, option: Any, plan: dict[str, int], moe: bool, steps: int = 5) -> Found:
    """(applied and kept, kept) by name after some steps, of this rank's parts."""
    running = make(world, option, plan, moe)
    start = copies(running)
    for batch in running.batches(text(), steps=steps):
        running.step(batch)
    applied, waits = moved(running, start), kept(running)
    running.close()
    return {name: each + waits[name] for name, each in applied.items()}, waits


@cache
def truth(plan: tuple[tuple[str, int], ...], moe: bool, steps: int = 5) -> list[dict[str, Tensor]]:
    """What an exact exchange applies, on each rank."""
    size = math.prod(degree for axis, degree in plan if axis != "ep")
    return [found for found, _ in run_ranks(account, size, "allreduce", dict(plan), moe, steps)]


def compare(found: dict[str, Tensor], waits: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert sum(each.norm() for each in waits.values()) > 0.1 * sum(each.norm() for each in wanted.values())
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("plan", [{"tp": 2}, {"pp": 2}, {"ep": 2, "moe": True}, {"cp": 2}], ids=str)
@pytest.mark.parametrize("name", KEEPING)
def test_applied_and_kept_are_the_truth_of_a_model_that_is_cut(name: str, plan: dict[str, Any]) -> None:
    moe = "moe" in plan
    plan = {"dp": 4 if "ep" in plan else 2, **{key: value for key, value in plan.items() if key != "moe"}}
    exact = truth(tuple(plan.items()), moe)
    for (found, waits), wanted in zip(run_ranks(account, 4, KEEPING[name], plan, moe), exact, strict=True):
        compare(found, waits, wanted)


def before(world: Any, option: Any, plan: dict[str, int], moe: bool, directory: str) -> None:
    running = make(world, option, plan, moe)
    for batch in running.batches(text(), steps=3):
        running.step(batch)
    running.save(directory)
    running.close()


def after(world: Any, option: Any, plan: dict[str, int], moe: bool, directory: str, through: dict[str, int]) -> Found:
    running = make(world, option, plan, moe)
    start = copies(running)
    with warnings.catch_warnings(record=True) as said:
        running.load(directory)
    cut_otherwise = option["name"] == "powersgd" and not through.keys().isdisjoint(["tp", "ep"])
    assert len(said) == (cut_otherwise and world.rank == 0), "only what the next approximation starts from"
    for batch in running.batches(text(), steps=3):
        running.step(batch)
    applied, waits = moved(running, start), kept(running)
    running.close()
    return {name: each + waits[name] for name, each in applied.items()}, waits


RESUMED = [
    ({"dp": 4}, {"dp": 2}),
    ({"dp": 2}, {"dp": 3}),
    ({"dp": 2, "tp": 2}, {"dp": 4}),
    ({"dp": 2, "cp": 2}, {"dp": 2}),
    ({"dp": 4, "ep": 2}, {"dp": 2}),  # as many replicas of experts, in other chunks
    ({"dp": 2, "pp": 2}, {"dp": 2}),
]
IN_TURN = {
    ("topk", 0),
    ("topk", 2),
    ("topk", 5),
    ("powersgd", 1),
    ("powersgd", 3),
    ("sign", 0),
    ("sign", 4),
    ("delayed", 2),
}
"""Which algorithm resumes which; the others are for the matrix."""


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        pytest.param(name, *plans, marks=[] if (name, index) in IN_TURN else [pytest.mark.matrix])
        for name in [*KEEPING, "delayed"]
        for index, plans in enumerate(RESUMED)
        if name != "delayed" or "pp" not in plans[0]
    ],
)
def test_applied_and_kept_are_the_truth_over_a_resume_by_other_ranks(
    name: str, first: dict[str, int], then: dict[str, int], tmp_path: Path
) -> None:
    option = KEEPING.get(name, {"name": "delayed", "delay": 2})
    moe, size = "ep" in first, math.prod(degree for axis, degree in first.items() if axis != "ep")
    run_ranks(before, size, option, first, moe, str(tmp_path))
    (wanted,) = truth((), moe, 6)
    for found, waits in run_ranks(after, then["dp"], option, then, moe, str(tmp_path), first):
        compare(found, waits, wanted)
