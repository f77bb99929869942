"""Any torch optimizer fused, for other people's training loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from shoal.errors import UserError
from shoal.optim.fused.optimizer import FlatOptimizer
from shoal.optim.fused.storage import flatten
from shoal.optim.fused.trial import refusal


def fuse(factory: Callable[..., torch.optim.Optimizer]) -> Callable[[Iterable[Any]], FlatOptimizer]:
    """Makes a factory of the same optimizer over flat storage: `fuse(partial(RMSprop, lr=1e-3))(model.parameters())`.

    That takes parameters or groups of them, and moves their values into storage of its own. It raises UserError for an
    optimizer that is not elementwise.
    """

    def make(params: Iterable[Any]) -> FlatOptimizer:
        given = list(params)
        if not given:
            raise UserError("there are no parameters to optimise: give those of a model, e.g. model.parameters()")
        groups = (
            [{**g, "params": list(g["params"])} for g in given] if isinstance(given[0], dict) else [{"params": given}]
        )
        if against := refusal(factory, groups):
            raise UserError(f"this optimizer cannot be fused: {against}")
        member = {parameter: index for index, group in enumerate(groups) for parameter in group["params"]}
        named = {str(number): parameter for number, parameter in enumerate(member)}
        return FlatOptimizer(factory, groups, flatten(named, {name: member[p] for name, p in named.items()}), named)

    return make
