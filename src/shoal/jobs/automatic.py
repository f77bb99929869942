"""The plan of a job that asks for one, or gives none, for the ranks that there are.

Rank 0 asks the planner and tells the others. A job that gives nothing of a plan is data parallel as long as no other
plan could gain much (see `gain`), and if the planner predicts none that is clearly faster. What asks it (see `asking`)
is imported only then.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import psutil

from shoal.comm import World, link_of
from shoal.comm.first import from_first
from shoal.device import free_memory, hardware_name, is_accelerator, processor_name
from shoal.jobs.choose import Settled, under
from shoal.jobs.config import Job, Origins
from shoal.jobs.gain import Ranks, is_small, why_not_searched
from shoal.jobs.trials import Trials, end_trial, key_of, read
from shoal.launch.process import usable_cores
from shoal.plan import Plan
from shoal.planner.cluster import Link
from shoal.planner.measure import USUAL, groups_of, ring_of

SLOW = Link(1e-4, 1e8)
"""Gigabit Ethernet, the slowest that hosts are joined by for training."""


def pinned(job: Job, origins: Origins) -> dict[str, Any]:
    """The fields of the plan that a job gives: its file, the command, or who made the Job."""
    given = [key.removeprefix("plan.") for key, origin in origins.items() if origin in ("file", "cli")]
    names = {each.name: each.name in given for each in fields(Plan)}
    made = {name for name in job.plan.to_dict() if f"plan.{name}" not in origins}
    return {name: getattr(job.plan, name) for name, is_given in names.items() if is_given or name in made}


def planned(settled: Settled, world: World, runs: bool = True, failed: bool | None = None) -> Settled:
    """Returns the job under the plan that is the fastest on these ranks, where it asks for one or gives nothing of a
    plan; else as it is. `runs`: whether the ranks may run a small model for a moment, to time it. `failed`: of a
    later generation of the run, see events.Generation; None in the first. A collective call; raises UserError, on all
    ranks alike, where nothing is legal or fits."""
    if (known := _under_trial(settled, world, failed)) is not None:
        return replace(under(settled, known.plan, known.microbatch), trials=known, why=known.why)
    if not settled.job.auto.wanted:
        if pinned(settled.job, settled.origins) or settled.job.run.at:
            return settled
        if (why := _why_not_searched(settled, world)) is not None:
            return replace(settled, why=why)
    from shoal.jobs.answer import ran_together
    from shoal.jobs.asking import answer, check_experts, cluster_of_ranks, keeps_microbatch

    check_experts(settled)
    groups = groups_of(world)
    if runs:
        ran_together(settled, world, keeps_microbatch(settled))

    def ask() -> list[Any]:
        cluster = cluster_of_ranks(settled, world, groups)
        return answer(settled, cluster, is_small(settled, _memory_of(world)))

    plan, rows, trials, why = from_first(world.everyone, ask, 'plan = "auto": ')
    if plan is None:
        return replace(settled, why=why)
    trials = None if trials is None else replace(Trials.from_wire(trials), machine=_machine(world))
    return replace(under(settled, Plan.from_dict(plan), rows), trials=trials, why=why)


def _why_not_searched(settled: Settled, world: World) -> str | None:
    """Why no one is asked, as `gain` finds it; None where the planner is to be. Ranks measure their link only where one
    of SLOW would leave something to gain: others stand still meanwhile where a rank joins a run."""

    def why(link: Link) -> str | None:
        found: str | None = from_first(world.everyone, lambda: why_not_searched(settled, ranks_of(world, link)))
        return found

    if _share_memory(world):
        return why(USUAL)
    found = why(SLOW)
    if found is not None or world.size == 1:
        return found
    measured = link_of(world.everyone, world.device)
    return why(ring_of(measured.ranks, measured.latency, measured.bandwidth))


def _share_memory(world: World) -> bool:
    """Whether all ranks are cores of one host, whose link is known well enough."""
    return world.on_host == world.size and not is_accelerator(world.device)


def ranks_of(world: World, link: Link) -> Ranks:
    """The ranks of `world`, with such a link between them."""
    return Ranks(world.size, world.device, _memory_of(world), link)


def _memory_of(world: World) -> int:
    """Bytes that are free for a rank."""
    return free_memory(world.device) or psutil.virtual_memory().available // world.on_host


def _under_trial(settled: Settled, world: World, failed: bool | None) -> Trials | None:
    """The trials of a run that goes on: of the job that asks for them, or of its resolved.toml while they last. A
    collective call."""
    job, found = settled.job, None
    if world.rank == 0 and failed is not None:
        end_trial(Path(job.run.dir), failed)
    if world.rank == 0 and (failed is not None or job.run.resume == "auto") and not job.auto.open:
        asks = job.auto.wanted and job.auto.measure > 1
        key = key_of(job, settled.origins, pinned(job, settled.origins), world.size) if asks else None
        kept = read(Path(job.run.dir), key, _machine(world))
        if kept is not None and _speaks_of(kept, job):
            found = kept.after_the_end(failed is not False).to_wire()
    found = world.everyone.broadcast_object(found)
    return None if found is None else Trials.from_wire(found)


def _machine(world: World) -> str:
    """The kind of machine, which decides what steps take: by kind and not by name, as a job that is started again on
    other hosts like these goes on with what was measured, and with which plans have ended it."""
    own = hardware_name(world.device) or f"{usable_cores()} cores of {processor_name()}"
    return f"{world.on_host} ranks on each host, {own}"


def _speaks_of(kept: Trials, job: Job) -> bool:
    """Whether trials, of its own key where a job asks for some, are those of `job`."""
    if job.auto.wanted:
        return job.auto.measure > 1 and not kept.ended
    plans = [Plan.from_dict(dict(each.plan)) for each in kept.candidates]
    return kept.next is not None and kept.microbatch == job.train.microbatch and job.plan in plans
