"""The optimizers that a job can name."""

from __future__ import annotations

import inspect
from typing import Any

from shoal.errors import UserError, check_choice, did_you_mean
from shoal.optim.fused.trial import tried_out
from shoal.optim.groups import OptimizerFactory
from shoal.optim.named import OPTIMIZERS
from shoal.plan import option_parameters

OF_TRAIN = ("lr", "weight_decay")
"""Parameters of optimizers that are keys of [train] by themselves."""


def optimizer_named(option: str | dict[str, Any], lr: float) -> OptimizerFactory:
    """Returns a factory of the torch optimizer that `option` names: a name, or a table {name = "sgd", momentum = 0.9}.

    Raises UserError for an unknown name and for parameters that the optimizer does not take.
    """
    parameters = option_parameters(option)
    name = option if isinstance(option, str) else option.get("name")
    if name is None:
        raise UserError(f"train.optimizer = {option!r:.100} has no name: give it one of {', '.join(OPTIMIZERS)}")
    check_choice(f"train.optimizer = {name!r} is not one of", name, OPTIMIZERS)
    kind = OPTIMIZERS[str(name)]
    known = [each for each in inspect.signature(kind).parameters if each not in ("params", *OF_TRAIN)]
    for key in parameters:
        if key in OF_TRAIN:
            raise UserError(f"train.optimizer.{key} has a key of its own in [train]: give train.{key}")
        if key not in known:
            closest = did_you_mean(key, known)
            raise UserError(f"train.optimizer.{key} is no parameter of {name}.{closest} Parameters: {', '.join(known)}")
    return tried_out(kind, {"lr": lr, **parameters}, f"train.optimizer = {option!r} with lr = {lr}")
