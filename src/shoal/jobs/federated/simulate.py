"""Simulates the clients of a job in this process: `shoal fed sim`."""

from __future__ import annotations

import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from shoal.comm import World
from shoal.device import any_device, hardware_name
from shoal.errors import ShoalError, UserError
from shoal.federated.recipe import Recipe, rate_of
from shoal.federated.simulation import Simulation
from shoal.federated.state import load_state, save_state
from shoal.federated.strategies import strategy_named
from shoal.federated.together import MOST
from shoal.jobs.assemble import FLOOR
from shoal.jobs.attempt import Outcome, write_report
from shoal.jobs.config import Job, Origins, describe
from shoal.jobs.evaluate import measure_of
from shoal.jobs.federated.holdings import Dealt, deal
from shoal.jobs.federated.model import refuse_other_runs, save_model
from shoal.jobs.federated.record import Record
from shoal.jobs.lock import locked
from shoal.jobs.optimizers import optimizer_named
from shoal.jobs.stop import Stop
from shoal.jobs.write import origin_table, write_resolved
from shoal.optim.groups import decay_matrices_only
from shoal.plan import Plan
from shoal.report.events import FAILED
from shoal.report.metrics import RunRecord

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
        with locked(Path(job.run.dir), world.everyone):
            return _rounds(dealt, world, flower)
    finally:
        world.close()


def _check(job: Job, flower: bool) -> None:
    if job.federated is not None and not flower:
        strategy_named(job.federated.strategy)
    if job.plan != Plan():
        raise UserError("the clients of a simulation train in this process, one rank each: remove the table [plan]")
    if job.train.precision != "fp32":
        raise UserError(f'train.precision = {job.train.precision!r}: the clients of a simulation take "fp32"')
    if job.run.resume not in ("auto", "never"):
        raise UserError(
            f'run.resume = {job.run.resume!r}: a simulation goes on from the state in its own run.dir: give "auto" or '
            '"never"'
        )


def recipe_of(dealt: Dealt) -> Recipe:
    """Returns what the clients of a job do."""
    model, train = dealt.settled.model, dealt.settled.job.train
    rounds, schedule = dealt.federated.rounds, train.schedule or "constant"
    return Recipe(
        model.factory,
        model.loss,
        optimizer_named(train.optimizer, train.lr),
        train.global_batch,
        train.seed,
        train.clip or None,
        decay_matrices_only(train.weight_decay),
        rate_of(schedule, rounds, train.warmup or 0, FLOOR),
        measure_of(model.loss),
    )


def _rounds(dealt: Dealt, world: World, flower: bool) -> Outcome:
    job = dealt.settled.job
    run_dir = Path(job.run.dir)
    refuse_other_runs(run_dir, job.run.resume)
    _write(dealt, run_dir)
    device = any_device()
    simulation = _kind(flower)(recipe_of(dealt), dealt.clients(device), dealt.federated, device)
    if simulation.flat.size * min(simulation.clients.number, MOST) < SMALL:
        torch.set_num_threads(1)
    if not (resumed := load_state(simulation, run_dir, about(dealt, flower))):
        save_state(simulation, run_dir, about(dealt, flower))
    record = Record(run_dir, job.run.trackers, device, dealt.federated.rounds)
    record.start(_run_record(dealt, simulation))
    record.note(_how(simulation))
    if resumed:
        record.note(f"goes on after round {simulation.number}")
    limit = Stop(world.everyone, job.train.seconds)
    try:
        with limit:
            reason = _train(dealt, simulation, record, limit, about(dealt, flower))
            record.checkpoint(save_model(dealt.settled, simulation, world))
    except BaseException as error:
        _finish(record, run_dir, f"{FAILED} {error if isinstance(error, ShoalError) else type(error).__name__}")
        raise
    return Outcome(run_dir, simulation.number, reason, limit.signal, _finish(record, run_dir, reason))


def _kind(flower: bool) -> type[Simulation]:
    if not flower:
        return Simulation
    from shoal.federated.flower.simulation import FlowerSimulation  # raises UserError where Flower is missing

    return FlowerSimulation


def _train(dealt: Dealt, simulation: Simulation, record: Record, limit: Stop, about_it: dict[str, Any]) -> str:
    """Trains the rounds that are left; returns why it ended."""
    job, settings = dealt.settled.job, dealt.federated
    every, lr = job.run.save_every or 1, job.train.lr
    saved = simulation.number
    if simulation.number >= settings.rounds:
        return f"round {simulation.number} of {settings.rounds} was reached before: there is nothing left to train"
    if simulation.number == 0:
        record.evaluation(0, simulation.evaluate())
    reason = None
    while reason is None:
        result = simulation.round()
        number = simulation.number
        reason = limit.after_step()
        if reason is None and number >= settings.rounds:
            reason = f"all {number} rounds were trained"
        is_due = reason is not None or (settings.eval_every and number % settings.eval_every == 0)
        measured = simulation.evaluate() if is_due else None
        record.round(result, measured, lr * simulation.recipe.rate(number - 1), simulation.clients.number)
        if number % every == 0 or reason is not None:
            save_state(simulation, Path(job.run.dir), about_it)
            saved = number
    assert saved == simulation.number
    return reason


def about(dealt: Dealt, flower: bool) -> dict[str, Any]:
    """Returns what rounds that go on must be of: the model, the data and its deal, and what the server keeps."""
    job, federated = dealt.settled.job, dealt.federated
    named = {f"federated.{key}": getattr(federated, key) for key in ("clients", "partition", "strategy", "speeds")}
    named |= {"federated.buffer": federated.buffer, "train.seed": job.train.seed, "--flower": flower}
    named |= {f"data.{key}": getattr(job.data, key) for key in ("source", "validation", "tokenizer", "sequence")}
    named["data.source"] = str(job.data.source)
    return named | {"model": dict(job.model), "train.precision": job.train.precision}


def _write(dealt: Dealt, run_dir: Path) -> None:
    job = dealt.settled.job
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_resolved(job, dealt.settled.origins, run_dir)
    except OSError as error:
        raise UserError(f"the run directory {run_dir} cannot be written: {error}. Choose another run.dir") from error
    Console(file=sys.stdout, highlight=False).print(origin_table(job, dealt.settled.origins))


def _how(simulation: Simulation) -> str:
    counts = simulation.clients.train.counts
    spread = f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
    how = f"one after the other: {simulation.why}" if simulation.why else "together"
    return f"{simulation.clients.number} clients train on {spread} samples each, {how}"


def _run_record(dealt: Dealt, simulation: Simulation) -> RunRecord:
    device = simulation.weights.device
    return RunRecord(
        host=platform.node(),
        device=hardware_name(device) or f"CPU ({platform.machine()})",
        world=1,
        versions={"shoal": version("shoal"), "torch": torch.__version__, "python": platform.python_version()},
        parameters=simulation.flat.weights,
        peak_flops=0.0,
        config=describe(dealt.settled.job, dealt.settled.origins),
        total=dealt.federated.rounds,
        time=time.time(),
    )


def _finish(record: Record, run_dir: Path, reason: str) -> Path | None:
    """Writes the end record and the report. A full disk costs only the report."""
    record.end(reason)
    try:
        return write_report(run_dir)
    except OSError as error:
        print(f"warning: the report of {run_dir} cannot be written: {error}", file=sys.stderr)
        return None
