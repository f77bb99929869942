"""Weights in a loss, outside of their model, of which a rank computes a part: it would weigh that part by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.errors import UserError
from shoal.module.calls import calls_of
from shoal.parallel.in_loss import InLoss


class WeightsInLoss(InLoss):
    """Refuses in a loss to compute with some weights of `module`, but within a module that the loss calls.

    why: says of the name of a parameter why it is refused; None for one that is not. without: the plan in which it is
    not.
    """

    def __init__(self, module: nn.Module, why: Callable[[str], str | None], without: str) -> None:
        super().__init__()
        self._module, self._why, self._without = module, why, without
        self._parts = set(module.modules())
        self.watch(module)

    def check(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        given = {id(each) for each in tree_leaves((args, kwargs)) if isinstance(each, nn.Parameter)}
        if not given or not any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(result)):
            return
        if any(True for _ in calls_of(self._parts)):  # the loss has called a part of the module by itself
            return
        for name, each in self._module.named_parameters():
            if id(each) in given and (why := self._why(name)) is not None:
                raise UserError(
                    f"{why}. Leave a penalty on weights to the optimizer (weight_decay), call the module that it is of "
                    f"for anything else, or take {self._without}"
                )
