"""Simulates the clients of a job in this process: `shoal fed sim`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from shoal.comm import World
from shoal.device import any_device
from shoal.errors import UserError
from shoal.federated.simulation import Simulation
from shoal.federated.strategies import strategy_named
from shoal.federated.together import MOST
from shoal.jobs.config import Job, Origins
from shoal.jobs.federated.holdings import Dealt, deal
from shoal.jobs.federated.rounds import all_rounds, recipe_of
from shoal.jobs.lock import locked
from shoal.jobs.outcome import Outcome
from shoal.jobs.stop import Stop
from shoal.plan import Plan

SMALL = 4_000_000
"""Weights of all clients together below which one thread is faster: several wait for each other in every operation."""


def simulate(job: Job, origins: Origins, flower: bool = False) -> Outcome:
    """Trains the clients of `job`, from the state of its run directory where there is one, and writes the report.

    flower: with Flower's strategies.

    SIGINT and SIGTERM end the run after the round in progress. Raises UserError for what clients of a simulation cannot
    have, TrainingError where training fails.
    """
    _check(job, flower)
    dealt = deal(job, origins)
    world = World.single()
    try:
        with locked(Path(job.run.dir), world.everyone, replans=False):
            return _rounds(dealt, world, flower)
    finally:
        world.close()


def _check(job: Job, flower: bool) -> None:
    if job.federated is not None and not flower:
        strategy_named(job.federated.strategy)
    if job.plan != Plan() or job.auto.wanted:
        raise UserError("the clients of a simulation train in this process, one rank each: remove the table [plan]")
    if job.train.precision != "fp32":
        raise UserError(f'train.precision = {job.train.precision!r}: the clients of a simulation take "fp32"')
    if job.run.resume not in ("auto", "never"):
        raise UserError(
            f'run.resume = {job.run.resume!r}: a simulation goes on from the state in its own run.dir: give "auto" or '
            '"never"'
        )


def _rounds(dealt: Dealt, world: World, flower: bool) -> Outcome:
    device = any_device()

    def make(limit: Stop) -> Simulation:
        simulation = _kind(flower)(recipe_of(dealt), dealt.clients(device), dealt.federated, device)
        if simulation.flat.size * min(simulation.members, MOST) < SMALL:
            torch.set_num_threads(1)
        return simulation

    return all_rounds(dealt, world, {"--flower": flower}, make, _how)


def _kind(flower: bool) -> type[Simulation]:
    if not flower:
        return Simulation
    from shoal.federated.flower.simulation import FlowerSimulation  # raises UserError where Flower is missing

    return FlowerSimulation


def _how(simulation: Simulation, say: Callable[[str], None]) -> str:
    counts = simulation.clients.train.counts
    spread = f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
    how = f"one after the other: {simulation.why}" if simulation.why else "together"
    return f"{simulation.members} clients train on {spread} samples each, {how}"
