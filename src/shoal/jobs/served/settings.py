"""What of a job goes with a parameter server, and into how many gradients its steps are divided. Imports torch for a
codec alone."""

from __future__ import annotations

from shoal.errors import UserError
from shoal.jobs.config import Job
from shoal.jobs.served.table import BATCH, SYNC
from shoal.plan import Option

_OWN = ("recompute", "compile")
"""What of a plan concerns a single process."""


def check_served(job: Job, workers: int) -> None:
    """Raises UserError for a job that parameter servers and workers cannot train."""
    for key, value in job.plan.to_dict().items():
        if key not in _OWN:
            raise UserError(
                f"plan.{key} = {value!r} with a parameter server: each worker computes gradients of the whole model by "
                f"itself. Leave plan.{key} out, or leave ps out of the roles"
            )
    if job.auto.wanted:
        raise UserError(
            'plan = "auto" with a parameter server: each worker computes gradients of the whole model by itself, so '
            "nothing is to be found or tried. Leave plan.name, plan.measure and plan.allow out, or leave ps out of the "
            "roles"
        )
    _check_codec(job.server.codec)
    no_group = {
        "run.at": bool(job.run.at),
        "run.verify_every": bool(job.run.verify_every),
        "run.norms_every": bool(job.run.norms_every),
        "train.sync_bn": job.train.sync_bn,
    }
    for key, given in no_group.items():
        if given:
            raise UserError(
                f"{key} with a parameter server: it is of ranks that train in step. Leave {key} out, or leave ps out "
                "of the roles"
            )
    if (number := shares(job, workers)) > job.train.global_batch:
        raise UserError(
            f"train.global_batch = {job.train.global_batch}: a step has {number} shares under server.policy = "
            f'"{job.server.policy}". Give at least {number}'
        )


def _check_codec(option: Option | None) -> None:
    if option is not None:
        from shoal.comm.codecs import codec  # imports torch

        try:
            codec(option)
        except UserError as error:
            raise UserError(f"server.codec: {error}") from error


def shares(job: Job, workers: int) -> int:
    """Returns into how many gradients a step is divided, each of a worker's share of the global batch."""
    kind, number = job.server.kind
    return {SYNC: workers, BATCH: number}.get(kind, 1)
