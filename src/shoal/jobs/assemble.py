"""Makes an engine from a settled job."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch

from shoal.comm import World
from shoal.engine import Engine
from shoal.errors import UserError, did_you_mean, in_section
from shoal.jobs.config import Job
from shoal.models import ModelSpec
from shoal.optim.fused.trial import try_out
from shoal.optim.groups import OptimizerFactory, decay_matrices_only
from shoal.optim.lr import by_name
from shoal.plan import option_parameters

OPTIMIZERS = {
    name.lower(): getattr(torch.optim, name)
    for name in ("AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Adafactor")
}
"""torch's optimizers that update any parameter from its gradient alone."""

FLOOR = 0.1
"""Final learning rate of a schedule, relative to the peak."""


def make_engine(job: Job, model: ModelSpec, total: int | None, world: World) -> Engine:
    """Makes the engine that trains `model` as `job` says. `total`: steps over which the learning rate falls."""
    train = job.train
    assert train.schedule is not None and train.warmup is not None
    with in_section("train"):
        return Engine(
            model.factory,
            model.loss,
            optimizer_named(train.optimizer, train.lr),
            job.plan,
            global_batch=train.global_batch,
            microbatch=train.microbatch,
            precision=train.precision,
            seed=train.seed,
            clip=train.clip or None,
            schedule=by_name(train.schedule, total or 1, train.warmup, FLOOR),
            param_groups=decay_matrices_only(train.weight_decay),
            sync_bn=train.sync_bn,
            buffers=train.buffers,
            norms_every=job.run.norms_every,
            world=world,
        )


def optimizer_named(option: str | dict[str, Any], lr: float) -> OptimizerFactory:
    """Returns a factory of the torch optimizer that `option` names: a name, or a table {name = "sgd", momentum = 0.9}.

    Raises UserError for an unknown name and for parameters that the optimizer does not take.
    """
    parameters = option_parameters(option)
    name = option if isinstance(option, str) else option.get("name")
    if not isinstance(name, str) or name not in OPTIMIZERS:
        closest = did_you_mean(str(name), list(OPTIMIZERS))
        raise UserError(f"train.optimizer = {name!r} is not one of {', '.join(OPTIMIZERS)}.{closest}")
    kind = OPTIMIZERS[name]
    known = [each for each in inspect.signature(kind).parameters if each not in ("params", "lr", "weight_decay")]
    for key in parameters:
        if key not in known:
            closest = did_you_mean(key, known)
            raise UserError(f"train.optimizer.{key} is no parameter of {name}.{closest} Parameters: {', '.join(known)}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in parameters.items()}
    factory = partial(kind, lr=lr, **values)
    try_out(factory, f"train.optimizer = {option!r} with lr = {lr}")
    return factory
