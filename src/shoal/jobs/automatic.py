"""The plan of a job that asks for one, for the ranks that there are: `plan = "auto"`, and jobs without a [plan].

Rank 0 asks the planner and tells the others. A job without a [plan] whose weights, gradients and optimizer state are
small beside the memory of a rank is data parallel, without a search: any other plan would have to be a better one by
less than finding it takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from shoal.comm import Reaches, World
from shoal.comm.first import from_first
from shoal.device import any_device, free_memory
from shoal.errors import UserError, in_section
from shoal.jobs.answer import Chosen, confirmed, dry, task_of, under
from shoal.jobs.choose import Settled, Sizes
from shoal.jobs.config import Job, Origins
from shoal.jobs.optimizers import optimizer_named
from shoal.jobs.placed import placed
from shoal.jobs.trials import Trials, key_of, of_candidates, read
from shoal.module.batchnorm import has_batch_statistics
from shoal.plan import Plan
from shoal.planner.ask import numbers_of
from shoal.planner.cluster import Cluster
from shoal.planner.measure import groups_of, here
from shoal.planner.search import search
from shoal.precision import precision

SMALL = 1 / 4
"""Share of a rank's memory that a job's state may take to be planned without a search."""


def pinned(job: Job, origins: Origins) -> dict[str, Any]:
    """The fields of the plan that a job gives."""
    return {
        key.removeprefix("plan."): getattr(job.plan, key.removeprefix("plan."))
        for key, origin in origins.items()
        if key.startswith("plan.") and origin in ("file", "cli") and key not in ("plan.name", "plan.measure")
    }


def planned(settled: Settled, world: World) -> Settled:
    """Returns the job under the plan that is the fastest on these ranks, where it asks for one or gives nothing of a
    plan; else as it is. A collective call; raises UserError, on all ranks alike, where nothing is legal or fits."""
    if (known := _under_trial(settled, world)) is not None:
        return replace(under(settled, known.plan, known.microbatch), trials=known)
    if not settled.job.auto.wanted and pinned(settled.job, settled.origins):
        return settled
    if not settled.job.auto.wanted:
        small = is_small(settled, memory_of_a_rank(world)) if world.rank == 0 else None
        if world.everyone.broadcast_object(small):
            return settled
    groups = groups_of(world) if settled.job.auto.wanted else None

    def find() -> list[Any]:
        chosen = asked(settled, cluster_of_ranks(settled, world, groups))
        trials = _trials(settled, chosen, world) if settled.job.auto.measure > 1 else None
        sent = None if trials is None else trials.to_wire()
        return [chosen.plan.to_dict(), chosen.settled.job.train.microbatch, sent]

    plan, rows, sent = from_first(world.everyone, find, 'plan = "auto": ')
    trials = None if sent is None else Trials.from_wire(sent)
    return replace(under(settled, Plan.from_dict(plan), rows), trials=trials)


def _under_trial(settled: Settled, world: World) -> Trials | None:
    """The trials of a run that goes on: of the job that asks for them, or of its resolved.toml while they last. A
    collective call."""
    job, found = settled.job, None
    if world.rank == 0 and job.run.resume == "auto":
        kept = read(Path(job.run.dir))
        if kept is not None and _speaks_of(kept, settled, world):
            found = kept.after_a_death().to_wire()
    found = world.everyone.broadcast_object(found)
    return None if found is None else Trials.from_wire(found)


def _speaks_of(kept: Trials, settled: Settled, world: World) -> bool:
    job, pins = settled.job, pinned(settled.job, settled.origins)
    if job.auto.wanted:
        return job.auto.measure > 1 and not kept.ended and kept.key == key_of(job, settled.origins, pins, world.size)
    plans = [Plan.from_dict(dict(each.plan)) for each in kept.candidates]
    return kept.next is not None and kept.microbatch == job.train.microbatch and job.plan in plans


def _trials(settled: Settled, chosen: Chosen, world: World) -> Trials:
    """The plan that was chosen, and the next best with its microbatch that hold in a dry run."""
    job, task = settled.job, chosen.task
    rows = chosen.settled.job.train.microbatch
    task = replace(task, microbatch=rows or task.microbatch)
    plans = [(chosen.plan, chosen.estimate.seconds)]
    for estimate in search(task).best:
        plan = estimate.choice.plan(task.pins)
        if len(plans) < job.auto.measure and plan not in (each for each, _ in plans):
            with suppress(UserError):  # what a dry run refuses is not tried
                predictions = dry(under(settled, plan, rows), task, estimate)
                if all(each.need.total("device") <= task.most for each in predictions):
                    plans.append((plan, estimate.seconds))
    return of_candidates(key_of(job, settled.origins, pinned(job, settled.origins), world.size), rows, plans)


def asked(settled: Settled, cluster: Cluster) -> Chosen:
    """Asks the planner for the job on `cluster`."""
    task = task_of(settled, cluster, pinned(settled.job, settled.origins), keeps_microbatch(settled))
    return placed(settled, task, confirmed(settled, task))


def memory_of_a_rank(world: World) -> int:
    """Bytes that are free for each rank of this host."""
    return free_memory(world.device) or psutil.virtual_memory().available // world.local_size


def is_small(settled: Settled, memory: int) -> bool:
    """Whether all of the state of the job's model is a small share of a rank's memory. A model whose size is not known
    without its weights counts as small."""
    if settled.model.values.get("weights"):
        return True
    with in_section("train"):
        numbers = precision(settled.job.train.precision)
    each = numbers_of(numbers, optimizer_named(settled.job.train.optimizer, settled.job.train.lr))
    if (module := without_values(settled)) is None:
        return True
    elements = sum(parameter.numel() for parameter in module.parameters())
    nbytes = elements * (each.weight + each.gradient + each.master + each.state)
    return nbytes <= SMALL * memory


def keeps_microbatch(settled: Settled) -> bool:
    """Whether what is computed depends on the size of a microbatch, which then is not the planner's."""
    module = without_values(settled)
    return module is None or has_batch_statistics(module)


def without_values(settled: Settled) -> nn.Module | None:
    """Makes the job's model on the meta device; None where it cannot be made without values."""
    try:
        with torch.device("meta"):
            return settled.model.factory()
    except (NotImplementedError, RuntimeError, ValueError, TypeError):
        return None


def cluster_of_ranks(
    settled: Settled, world: World | Sizes, groups: Reaches | None = None, hosts: Sequence[str] = ()
) -> Cluster:
    """These ranks as a cluster. `groups`, `hosts`: see `here`."""
    with in_section("train"):
        dtype = precision(settled.job.train.precision).model
    device = world.device if isinstance(world, World) else any_device()
    return here(world.size, math.gcd(world.local_size, world.size), dtype, device, groups, hosts=hosts)
