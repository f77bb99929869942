"""Models that people have get a plan that trains them as one process does."""

from __future__ import annotations

from typing import Any

import pytest

from shoal import Engine, Plan, auto_plan
from shoal.errors import UserError
from shoal.planner.cluster import Cluster, Device, Host, Link
from tests.pool import run_ranks
from tests.zoo.runs import GLOBAL_BATCH, MICROBATCH, SGD, TOLERANCE, ZOO, reference

RANKS = {"4 ranks": (4, {}), "4 ranks, two copies": (4, {"dp": 2}), "2 ranks, one copy": (2, {"dp": 1})}
"""Ranks, and what is pinned: without copies a model has to be divided."""
STEPS = 2


def machine(ranks: int) -> Cluster:
    device = Device("cores", {"fp32": 1e11, "fp64": 5e10}, 2**33, 1e10, launch=1e-5, on_host=True)
    return Cluster("here", (Host(device, ranks, Link(1e-5, 2e9), 2**33, 5e9),), Link(1e-4, 1e9), 0.3)


def trained(world: Any, name: str, pins: dict[str, Any]) -> tuple[dict[str, Any], list[float]] | str:
    """The plan and the losses of its steps, or why there is none."""
    entry = ZOO[name]
    samples = entry.samples()
    common: dict[str, Any] = {"global_batch": GLOBAL_BATCH, "precision": entry.dtype, "world": world}
    try:
        plan, microbatch = auto_plan(
            entry.factory, entry.loss, SGD, samples[0], microbatch=MICROBATCH, pins=pins,
            cluster=machine(world.size), **common,
        )  # fmt: skip
    except UserError as refusal:
        return str(refusal)
    engine = Engine(entry.factory, entry.loss, SGD, plan, microbatch=microbatch, **common)
    try:
        return plan.to_dict(), [float(engine.step(batch).loss) for batch in engine.batches(samples, steps=STEPS)]
    finally:
        engine.close()


QUICK = {("vit", "2 ranks, one copy"), ("nn.Transformer", "2 ranks, one copy")}
"""The second stage of the one sees the names of the first one's parameters; the other asks whether a mask is causal."""
CASES = [
    case if case in QUICK else pytest.param(*case, marks=pytest.mark.matrix)
    for case in ((name, ranks) for name in ZOO for ranks in RANKS)
]


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_a_model_trains_under_the_plan_that_was_found(name: str, ranks: str) -> None:
    size, pins = RANKS[ranks]
    found = run_ranks(trained, size, name, pins)
    assert all(each == found[0] for each in found)
    assert not isinstance(found[0], str), found[0]
    plan, losses = found[0]
    assert Plan.from_dict(plan).size == size and plan.get("dp", 1) == pins.get("dp", plan.get("dp", 1))
    tolerance = TOLERANCE[ZOO[name].dtype][0]
    assert losses == pytest.approx(reference(name).losses[:STEPS], rel=tolerance)
