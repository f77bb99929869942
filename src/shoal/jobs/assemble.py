"""Makes an engine from a settled job."""

from __future__ import annotations

from shoal.comm import World
from shoal.engine import Engine
from shoal.errors import in_section
from shoal.jobs.config import Job
from shoal.jobs.optimizers import optimizer_named
from shoal.models import ModelSpec
from shoal.optim.groups import OptimizerFactory, decay_matrices_only
from shoal.optim.lr import by_name

FLOOR = 0.1
"""Final learning rate of a schedule, relative to the peak."""


def make_engine(
    job: Job,
    model: ModelSpec,
    total: int | None,
    world: World,
    joins: bool = False,
    optimizer: OptimizerFactory | None = None,
) -> Engine:
    """Makes the engine that trains `model` as `job` says. `total`: steps over which the learning rate falls; `joins`:
    see Engine; `optimizer`: in place of the job's, where others update, and clip."""
    train = job.train
    assert train.schedule is not None and train.warmup is not None
    with in_section("train"):
        return Engine(
            model.factory,
            model.loss,
            optimizer or optimizer_named(train.optimizer, train.lr),
            job.plan,
            global_batch=train.global_batch,
            microbatch=train.microbatch,
            precision=train.precision,
            seed=train.seed,
            clip=None if optimizer is not None else train.clip or None,
            schedule=by_name(train.schedule, total or 1, train.warmup, FLOOR),
            param_groups=decay_matrices_only(train.weight_decay),
            sync_bn=train.sync_bn,
            buffers=train.buffers,
            norms_every=job.run.norms_every,
            world=world,
            joins=joins,
        )
