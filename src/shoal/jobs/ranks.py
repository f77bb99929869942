"""The ranks of a job on this host, and its plan for them. Nothing here imports more of torch than devices need."""

from __future__ import annotations

from shoal.device import accelerators
from shoal.jobs.config import Job, Origins, put
from shoal.jobs.plans import check_plans
from shoal.launch.process import usable_cores
from shoal.mesh import Mesh


def ranks_here(job: Job) -> int:
    """Returns the number of ranks to start on this host: the job's, else the plan's size, else `default_ranks`."""
    if job.run.nproc is not None:
        return job.run.nproc
    return job.plan.size if job.plan.size > 1 else default_ranks()


def default_ranks() -> int:
    """Returns one rank for each GPU; without GPUs one for each core but at most two, which leaves a laptop usable."""
    return len(accelerators()) or min(2, usable_cores())


def spread(job: Job, origins: Origins, size: int) -> tuple[Job, Origins]:
    """Returns the job for `size` ranks, data parallel unless the plan says otherwise, and its origins.

    Raises UserError where the plan needs another number of ranks.
    """
    if "plan.dp" not in origins and job.plan.dp == 1 and size % job.plan.size == 0:
        job, origins = put(job, origins, "plan", dp=size // job.plan.size)
    Mesh(job.plan, 0, size)  # refuses a plan that does not fit
    check_plans(job, size)
    return job, origins
