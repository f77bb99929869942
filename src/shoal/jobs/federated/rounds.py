"""The rounds of a federated job, from its directory to the report, whoever its clients are."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.comm import World
from shoal.data import save_tokenizer
from shoal.device import hardware_name
from shoal.errors import ShoalError, UserError
from shoal.federated.recipe import Recipe, rate_of
from shoal.federated.simulation import Federation, Interrupted
from shoal.federated.state import load_state, save_state, seconds_of
from shoal.jobs.assemble import FLOOR
from shoal.jobs.config import describe
from shoal.jobs.evaluate import measure_of
from shoal.jobs.federated.holdings import Dealt
from shoal.jobs.federated.model import refuse_other_runs, save_model
from shoal.jobs.federated.record import Record
from shoal.jobs.names import TOKENIZER
from shoal.jobs.optimizers import optimizer_named
from shoal.jobs.outcome import Outcome, report_on
from shoal.jobs.stop import Stop
from shoal.jobs.write import origin_table, write_resolved
from shoal.optim.groups import decay_matrices_only
from shoal.report.events import FAILED
from shoal.report.metrics import RunRecord
from shoal.report.versions import versions


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


def all_rounds(
    dealt: Dealt,
    world: World,
    how: Mapping[str, Any],
    make: Callable[[Stop], Federation],
    tell: Callable[[Any, Callable[[str], None]], str],
) -> Outcome:
    """Trains the rounds of a job that are left; writes its directory, the model as a checkpoint, and the report.

    how: what trains them, which rounds that go on must have alike. make: makes that, given what ends the run. tell:
    says what it has made; it is given what shows a line.
    """
    job, run_dir = dealt.settled.job, Path(dealt.settled.job.run.dir)
    refuse_other_runs(run_dir, job.run.resume)
    write_directory(dealt, run_dir)
    before, about_it = seconds_of(run_dir), about(dealt, how)
    limit = Stop(world.everyone, None if job.train.seconds is None else job.train.seconds - before)
    trains = make(limit)
    if not (resumed := load_state(trains, run_dir, about_it)):
        save_state(trains, run_dir, about_it, before)
    if dealt.settled.tokenizer is not None:
        save_tokenizer(dealt.settled.tokenizer, run_dir / TOKENIZER)
    record = Record(run_dir, job.run.trackers, trains.weights.device, dealt.federated.rounds)
    record.start(_run_record(dealt, trains))
    record.note(tell(trains, record.note))
    if resumed:
        record.note(f"goes on after round {trains.number}")
    try:
        with limit:
            reason = _train(dealt, trains, record, limit, about_it, before)
            record.checkpoint(save_model(dealt.settled, trains, world))
    except BaseException as error:
        record.end(f"{FAILED} {error if isinstance(error, ShoalError) else type(error).__name__}")
        if unwritten := report_on(run_dir)[1]:
            print(f"warning: {unwritten}", file=sys.stderr)
        raise
    record.end(reason)
    return Outcome(run_dir, trains.number, reason, limit.signal, *report_on(run_dir))


def _train(
    dealt: Dealt, trains: Federation, record: Record, limit: Stop, about_it: dict[str, Any], before: float
) -> str:
    """Trains the rounds that are left; returns why it ended. before: seconds that earlier attempts have trained."""
    settings, run_dir = dealt.federated, Path(dealt.settled.job.run.dir)
    if trains.number >= settings.rounds:
        return f"round {trains.number} of {settings.rounds} was reached before: there is nothing left to train"
    reason = limit.was_over
    while reason is None:
        try:
            if trains.number == 0:
                record.evaluation(0, trains.evaluate())
            reason = _round(dealt, trains, record, limit)
        except Interrupted:  # the round is not counted
            reason = limit.after_step()
            assert reason is not None
        if trains.number % (dealt.settled.job.run.save_every or 1) == 0 or reason is not None:
            save_state(trains, run_dir, about_it, before + limit.elapsed)
    return reason


def _round(dealt: Dealt, trains: Federation, record: Record, limit: Stop) -> str | None:
    """Trains a round and records it; returns why it was the last one."""
    settings, job = dealt.federated, dealt.settled.job
    result = trains.round()
    number, measured = trains.number, None
    reason = limit.after_step()
    if reason is None and number >= settings.rounds:
        reason = f"all {number} rounds were trained"
    if reason is not None or (settings.eval_every and number % settings.eval_every == 0):
        with suppress(Interrupted):  # the round itself is whole
            measured = trains.evaluate()
    record.round(result, measured, job.train.lr * trains.recipe.rate(number - 1), trains.members)
    return reason


def about(dealt: Dealt, how: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what rounds that go on must be of: the model, the data and its deal, and what the server keeps."""
    job, federated = dealt.settled.job, dealt.federated
    named = {f"federated.{key}": getattr(federated, key) for key in ("clients", "partition", "strategy", "speeds")}
    named |= {"federated.buffer": federated.buffer, "train.seed": job.train.seed, **how}
    named |= {f"data.{key}": getattr(job.data, key) for key in ("source", "validation", "tokenizer", "sequence")}
    named["data.source"] = str(job.data.source)
    if dealt.settled.tokenizer is not None:  # one of the same name may be trained on other documents by now
        named["fingerprint of data.tokenizer"] = dealt.settled.tokenizer.fingerprint
    return named | {"model": dict(job.model), "train.precision": job.train.precision}


def write_directory(dealt: Dealt, run_dir: Path) -> None:
    """Makes the run directory, with resolved.toml, and prints the values. Raises UserError."""
    job = dealt.settled.job
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_resolved(job, dealt.settled.origins, run_dir)
    except OSError as error:
        raise UserError(f"the run directory {run_dir} cannot be written: {error}. Choose another run.dir") from error
    Console(file=sys.stdout, highlight=False).print(origin_table(job, dealt.settled.origins))


def _run_record(dealt: Dealt, trains: Federation) -> RunRecord:
    device = trains.weights.device
    return RunRecord(
        host=platform.node(),
        device=hardware_name(device) or f"CPU ({platform.machine()})",
        world=1,
        versions=versions(),
        parameters=trains.flat.weights,
        peak_flops=0.0,
        config=describe(dealt.settled.job, dealt.settled.origins),
        total=dealt.federated.rounds,
        time=time.time(),
    )
