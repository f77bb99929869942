"""What the matrices of plans have in common: a run under a plan, the same in one process, and ranks that agree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import torch

from shoal import Plan
from shoal.engine import Engine
from tests.parity.cases import CASES, EVEN, Trace, engine, train
from tests.pool import apart, run_ranks

STEPS = 5  # the fourth is short


def under(
    world, case: str, precision: str, accumulation: int, plan: dict[str, Any], name: str = "", **more: Any
) -> Engine:
    """A plan whose name ends with "hosts" has each rank on a host of its own."""
    return engine(
        case,
        precision,
        accumulation,
        world=apart(world) if name.endswith("hosts") else world,
        plan=Plan(**plan),
        **more,
    )


def trained(
    world, case: str, precision: str, accumulation: int, plan: dict[str, Any], name: str, alike: bool, **more: Any
) -> Trace:
    """The plan named "disk" gets a directory that all ranks share."""
    with TemporaryDirectory() as directory:
        shared = world.everyone.broadcast_object(directory)
        options = plan | ({"memory": {"disk": shared}} if name == "disk" else {})
        running = under(world, case, precision, accumulation, options, name, **more)
        try:
            return followed(running, case, alike)
        finally:
            running.close()
            world.everyone.barrier()


def followed(running: Engine, case: str, alike: bool) -> Trace:
    """Trains through a short batch, and evaluates. `alike`: three steps of one shape and no evaluation, which would be
    compiled for itself, as a short batch is: most of such a row's time."""
    if alike:
        return train(running, CASES[case].data()[:EVEN], 3, evaluates=False)
    return train(running, CASES[case].data(), STEPS)


def _alone(world, case: str, precision: str, accumulation: int, alike: bool) -> Trace:
    return followed(engine(case, precision, accumulation, world=world), case, alike)


@cache
def one_process(case: str, precision: str, accumulation: int, alike: bool = False) -> Trace:
    return run_ranks(_alone, 1, case, precision, accumulation, alike)[0]


def size_of(plan: dict[str, Any]) -> int:
    return Plan(**{**plan, "memory": None}).size


def check_alike(traces: Sequence[Trace]) -> None:
    for trace in traces[1:]:
        assert trace.losses == traces[0].losses and trace.norms == traces[0].norms, "a result is the same on every rank"
        assert all(torch.equal(trace.weights[name], value) for name, value in traces[0].weights.items())
    for name, value in traces[0].weights.items():
        assert torch.equal(traces[0].seen[name], value.to(traces[0].seen[name].dtype)), "the module sees the masters"
