"""Asks the planner for a job on the ranks that there are: which plan, what was predicted of it, and which to try."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from shoal import units
from shoal.comm import Reaches, World
from shoal.device import any_device
from shoal.errors import UserError, in_section
from shoal.jobs.answer import Chosen, forecast_of, task_of
from shoal.jobs.automatic import pinned
from shoal.jobs.choose import Settled, Sizes, microbatches_of, under
from shoal.jobs.gain import SHARE
from shoal.jobs.placed import placed
from shoal.jobs.trials import Trials, key_of, of_candidates
from shoal.module.batchnorm import has_batch_statistics
from shoal.module.build import without_values
from shoal.module.compiling import fuses
from shoal.plan import option_name
from shoal.planner.cluster import Cluster
from shoal.planner.degrees import FIELDS, Spread
from shoal.planner.measure import here
from shoal.planner.pins import check_pins
from shoal.planner.prepare import Untraced
from shoal.planner.replicable import as_replicable, not_kept
from shoal.planner.search import Search, search
from shoal.planner.task import EXACT, Choice, Task
from shoal.planner.untraced import without_trace
from shoal.precision import precision
from shoal.toml import plan_text
from shoal.training.microbatches import check_routing


def answer(settled: Settled, cluster: Cluster, small: bool) -> list[Any]:
    """The plan, the microbatch and the trials that the planner gives, and why: None for all but the last where data
    parallelism stays. `small`: its state leaves a rank room enough. A model that cannot be traced is data parallel."""
    try:
        return _searched(settled, cluster, small)
    except Untraced as error:
        plan, why = without_trace(pinned(settled.job, settled.origins), cluster.size, error)
        return [plan.to_dict(), None, None, why]


def _searched(settled: Settled, cluster: Cluster, small: bool) -> list[Any]:
    """Returns what `answer` does of a model that can be traced; raises Untraced for another."""
    if not settled.job.auto.wanted and small and (why := stays(settled, cluster)) is not None:
        return [None, None, None, why]
    chosen = asked(settled, cluster)
    rows = chosen.settled.job.train.microbatch
    trials = _trials(settled, chosen) if settled.job.auto.measure > 1 else None
    return [chosen.plan.to_dict(), rows, None if trials is None else trials.to_wire(), _why(chosen)]


def _why(chosen: Chosen) -> str:
    """What was predicted of the plan and of the next best one."""
    said = f"{units.duration(chosen.estimate.seconds)} a step predicted"
    if why := not_kept(chosen.task, chosen.settled.job.train.buffers).get("copies"):
        said = f"{said}; one replica: {why}"
    if not chosen.others:
        return f"{said}; no other plan fits"
    other = chosen.others[0]
    plan = other.choice.plan(chosen.task.pins).to_dict()
    rows = f", microbatch = {other.choice.microbatch}" if chosen.task.microbatch is None else ""
    return f"{said}; next best: {plan_text(plan)}{rows} with {units.duration(other.seconds)}"


def stays(settled: Settled, cluster: Cluster) -> str | None:
    """Why data parallelism stays though the planner was asked: nothing that it finds is clearly faster. None where
    something is, or where data parallelism as the job begins it does not fit or cannot keep the model's buffers."""
    task = task_here(settled, cluster, {})
    if "copies" in not_kept(task, settled.job.train.buffers):
        return None
    rows, _ = microbatches_of(settled.job)
    search_of, spread = Search(task), Spread(copies=cluster.size)
    if cluster.size > task.rows:
        return None
    own = search_of.simulated(search_of.estimate(Choice(spread, rows)))
    if own.bytes > task.most or own.choice.recompute != "none":
        return None
    best = search_of.run().best
    if best and best[0].seconds < (1 - SHARE) * own.seconds:
        return None
    return f"the planner predicts none that is {SHARE:.0%} faster"


def task_here(settled: Settled, cluster: Cluster, pins: dict[str, Any], limit: float | None = None) -> Task:
    """What is asked for the job on `cluster`, which is here: blocks are compiled where there is a compiler."""
    task = task_of(settled, cluster, pins, keeps_microbatch(settled), limit)
    return replace(task, compiled=task.compiled and fuses(any_device()))


def asked(settled: Settled, cluster: Cluster) -> Chosen:
    """Asks the planner for the job on `cluster`."""
    pins = pinned(settled.job, settled.origins)
    check_pins(pins)
    task = task_here(settled, cluster, pins)
    return as_replicable(task, settled.job.train.buffers, partial(placed, settled))


def _trials(settled: Settled, chosen: Chosen) -> Trials:
    """The plan that was chosen, and the next best with its microbatch and its exchange that hold in a dry run; of
    replicas that agree in another way than by the mean with as many, since their number decides what is computed."""
    job, task, how = settled.job, chosen.task, chosen.estimate.choice.exchange
    rows = chosen.settled.job.train.microbatch
    task = replace(task, microbatch=rows or task.microbatch, exchanges=(how,))
    if option_name(task.pins.get("exchange", how), "exchange") != EXACT:
        task = replace(task, pins={**task.pins, FIELDS["copies"]: chosen.estimate.choice.spread.copies})
    plans, runs = [(chosen.plan, chosen.estimate.seconds)], None
    for estimate in search(task).best:
        plan = estimate.choice.plan(task.pins)
        if len(plans) < job.auto.measure and plan not in (each for each, _ in plans):
            with suppress(UserError):  # what a dry run refuses is not tried
                forecast = forecast_of(under(settled, plan, rows), task, runs)
                runs, predictions = forecast.runs, forecast.of(plan, estimate.places)
                if not any(each.lacking(task.usable) for each in predictions):
                    plans.append((plan, estimate.seconds))
    return of_candidates(key_of(job, settled.origins, pinned(job, settled.origins), task.cluster.size), rows, plans)


def keeps_microbatch(settled: Settled) -> bool:
    """Whether what is computed depends on the size of a microbatch, which then is not the planner's; nor is it where
    statistics of the global batch take all of a rank's rows at once."""
    if settled.job.train.sync_bn:
        return True
    module = without_values(settled.model.factory)
    return module is None or has_batch_statistics(module)


def check_experts(settled: Settled) -> None:
    """Raises UserError where the microbatch, which the job does not give, decides what experts compute: it would follow
    the machine."""
    train = settled.job.train
    if train.microbatch is not None and not train.sync_bn:
        return  # nothing to look for in the model
    if (module := without_values(settled.model.factory)) is not None:
        with in_section("train"):
            check_routing(train.microbatch, module, train.sync_bn)


def cluster_of_ranks(
    settled: Settled, world: World | Sizes, groups: Reaches | None = None, hosts: Sequence[str] = ()
) -> Cluster:
    """These ranks as a cluster. `groups`, `hosts`: see `here`."""
    with in_section("train"):
        dtype = precision(settled.job.train.precision).model
    if isinstance(world, World):
        return here(world.size, world.per_host, dtype, world.device, groups, hosts=hosts, sharing=world.on_host)
    per_host = math.gcd(world.local_size, world.size)
    return here(world.size, per_host, dtype, any_device(), groups, hosts=hosts, sharing=world.local_size)
