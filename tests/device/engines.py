"""The engine on a device: a row of the parity matrix, run on the simulated accelerator or on the CPU."""

from __future__ import annotations

import math
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from shoal import Plan
from shoal.comm import World
from shoal.comm.world import Seat
from tests.device.simulator import Rank
from tests.parity.cases import CASES, Trace, engine, train


def world_of(rank: Rank, where: str) -> World:
    """All ranks on this host, each on the device `where` of its own number ("cpu": on the CPU)."""
    store = dist.FileStore(f"{rank.folder}/{where}", rank.size) if rank.size > 1 else None
    device = where if where == "cpu" else f"{where}:{rank.rank}"
    return World(rank.rank, rank.size, seat=Seat(rank.rank, rank.size), store=store, device=device)


def trained(rank: Rank, where: str, case: str, precision: str, plan: dict[str, Any], steps: int) -> Trace:
    """What `steps` steps under `plan` leave, on the CPU."""
    world = world_of(rank, where)
    with TemporaryDirectory() as directory:
        options = {
            name: value | {"disk": directory} if name == "memory" and "disk" in value else value
            for name, value in plan.items()
        }
        running = engine(case, precision, 1, world=world, plan=Plan(**options))
        try:
            return on_cpu(train(running, CASES[case].data(), steps))
        finally:
            running.close()


def on_cpu(trace: Trace) -> Trace:
    moved = {
        name: {key: value.cpu() for key, value in getattr(trace, name).items()}
        for name in ("gradients", "weights", "seen", "buffers")
    }
    aux = [{key: float(value) for key, value in each.items()} for each in trace.aux]
    return replace(trace, losses=list(map(float, trace.losses)), norms=list(map(float, trace.norms)), aux=aux, **moved)


def difference(one: Trace, other: Trace) -> float:
    """The largest of losses, norms and weights; 0 where all of them are equal to the bit, infinite where a number is
    NaN in one alone."""
    pairs = [tuple(torch.tensor(each.losses + each.norms, dtype=torch.float64) for each in (one, other))]
    pairs += [(one.weights[name], value) for name, value in other.weights.items()]
    apart = [torch.where(a.isnan() & b.isnan(), 0.0, a - b).abs().nan_to_num(nan=math.inf) for a, b in pairs]
    return max(float(each.max()) for each in apart)


def steps_alone(rank: Rank, where: str, plan: dict[str, Any], steps: int) -> None:
    """Trains `steps` steps; nobody reads what they return."""
    running = engine("gpt", "fp32", 1, world=world_of(rank, where), plan=Plan(**plan))
    for batch in running.batches(CASES["gpt"].data(), steps=steps):
        running.step(batch)
    torch.ops.sim.drain()  # what the close waits for is none of the steps'
    running.close()


def there_and_back(rank: Rank, where: str, plan: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Three steps, each in an engine of its own that goes on with the checkpoint of the one before: all on the CPU, and
    the second one on the device. Returns the losses of both."""
    data = CASES["gpt"].data()

    def losses(devices: tuple[str, str, str], directory: str) -> list[float]:
        found = []
        for step, device in enumerate(devices):
            running = engine("gpt", "fp32", 1, world=world_of(rank, device), plan=Plan(**plan))
            if step:
                running.load(f"{directory}/{step - 1}")
            found.append(running.step(next(iter(running.batches(data)))).loss)
            running.save(f"{directory}/{step}")
            running.close()
        return found

    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        return losses(("cpu", "cpu", "cpu"), one), losses(("cpu", where, "cpu"), other)
