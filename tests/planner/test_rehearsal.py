"""What a rehearsal says of a step is what the engine does: calls and bytes by its ledger, and the most memory by
torch's MemTracker, to the byte, for rows of the parity matrix.

The rows are those that cover its pairs; a handful run in every suite. MemTracker sees what operations on the calling
thread make, and storages whose memory comes and goes (weights that pass, masters that are closed); so the engine's
lanes run in that thread here.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from shoal import Engine, Plan, UserError
from shoal.assembly.recipe import Recipe
from shoal.comm import Link, World
from shoal.comm.silent import AtOnce
from shoal.planner.rehearsal import STEADY, Seen, Step, more_than, rehearse, tensors_of
from tests.parity.cases import CASES, arguments, engine
from tests.parity.covering import thinned
from tests.parity.test_parity import COVERING, PLANS
from tests.pool import apart, run_ranks

ALWAYS = [
    ("mlp-dropout", 2, "bf16", 3, "zero2"),
    ("auxiliary", 2, "fp32", 1, "offload"),
    ("gpt", 2, "fp32", 1, "budget-hosts"),
]
REFUSED = ("deferred", "disk")
"""Plans of which a part runs on another thread, or needs bytes."""
BY_VALUES = ("moe", "mixtral", "unused-frozen")
"""Models of which values decide what is allocated: how many tokens an expert is given, whether a layer runs."""
ROWS = sorted({*ALWAYS, *(row for row in COVERING if row[4] not in REFUSED)})
DEFAULTS = {name: each.default for name, each in inspect.signature(Engine.__init__).parameters.items()}


def real(world: World, case: str, precision: str, accumulation: int, plan: str) -> tuple[Step, Link | None]:
    """A steady step of an engine, and the link that it has measured."""
    if plan.endswith("hosts"):
        world = apart(world)
    world.lane = lambda: AtOnce(world.device, world.ledger)  # type: ignore[method-assign]
    running = engine(case, precision, accumulation, world=world, plan=Plan(dp=world.size, **PLANS[plan]))
    try:
        for batch in running.batches(CASES[case].data(), steps=STEADY):
            before = running.ledger.traffic
            seen = Seen(tensors_of(running._memory, running._trainer, running.module))
            with seen:
                running.step(batch)
        return Step(more_than(before, running.ledger.traffic), seen.held, seen.most), running.parts.link
    finally:
        running.close()


def recipe(case: str, precision: str, accumulation: int) -> Recipe:
    own: dict[str, Any] = {"loss": CASES[case].loss, "optimizer": CASES[case].optimizer}
    return Recipe.taken_from({**DEFAULTS, **own, **arguments(precision, accumulation)})


@pytest.mark.parametrize(("case", "size", "precision", "accumulation", "plan"), thinned(ROWS, ALWAYS))
def test_a_step_is_as_it_was_rehearsed(case, size, precision, accumulation, plan):
    chosen, own = CASES[case], recipe(case, precision, accumulation)
    one_host, whole = not plan.endswith("hosts"), Plan(dp=size, **PLANS[plan])
    if case == "mixtral" and precision != "bf16":
        with pytest.raises(UserError, match="BF16"):  # torch's rule for fake products by groups takes nothing else
            rehearse(chosen.factory, own, whole, chosen.data())
        return
    steps = run_ranks(real, size, case, precision, accumulation, plan)
    for rank in {0, size - 1}:
        step, link = steps[rank]
        found = rehearse(chosen.factory, own, whole, chosen.data(), rank, one_host=one_host, link=link)[-1]
        assert found.traffic == step.traffic
        if case == "resnet-batchnorm" and "recompute" in PLANS[plan]:  # 0.2% less than the run takes, under "selective"
            assert found.held == step.held and found.most == pytest.approx(step.most, rel=0.01)
        else:
            assert (found.held, found.most) == (step.held, step.most) or case in BY_VALUES


@pytest.mark.fast
@pytest.mark.parametrize("options", [{"pp": 2}, *(PLANS["deferred"], {"memory": {"disk": "/nowhere"}})], ids=str)
def test_plans_that_cannot_be_rehearsed_say_why(options):
    with pytest.raises(UserError, match="cannot be rehearsed: "):
        rehearse(CASES["mlp-dropout"].factory, recipe("mlp-dropout", "fp32", 1), Plan(**options), [])
