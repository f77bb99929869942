"""Weights of experts in a loss: each rank has its own experts, and would weigh them by its own part of the count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.errors import UserError
from shoal.parallel.expert.dispatch import Dispatched
from shoal.parallel.in_loss import InLoss


class ExpertWeights(InLoss):
    """Refuses in a loss, outside of `module`, to compute with weights of experts that are on this rank alone.

    ranks: those that have other experts
    """

    def __init__(self, module: nn.Module, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        self._experts = {name: each for name, each in module.named_modules() if isinstance(each, Dispatched)}
        self.watch(module)

    def check(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        given = {id(each) for each in tree_leaves((args, kwargs)) if isinstance(each, nn.Parameter)}
        if not given or not any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(result)):
            return
        for name, module in self._experts.items():
            for key, each in module.named_parameters(recurse=False):
                if id(each) in given:
                    raise UserError(
                        f"plan.ep = {self._ranks}: the loss computes with {name}.{key}, of which each rank has the "
                        "part of its own experts, and would weigh it by what it has counted itself. Leave a penalty on "
                        "weights to the optimizer (weight_decay), or take plan.ep = 1"
                    )
