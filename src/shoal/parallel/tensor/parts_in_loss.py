"""Parts of a model that a loss calls by themselves, where ranks have parts of what these take or give: the loss would
compute with a part as if it were the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from shoal.errors import UserError
from shoal.module.calls import calls_of
from shoal.parallel.in_loss import InLoss

_ALIKE = frozenset(["clone", "contiguous", "detach", "dropout", "float", "gelu", "glu_", "to", "type_as"])
"""Functions that compute each element by itself, beside those that torch has a tag on."""


class Parts(Enum):
    """What of a module that is called by itself is not that of one process: nothing, the values that it gives, or
    gradients."""

    NONE, VALUES, GRADIENTS = range(3)


class PartsInLoss(InLoss):
    """Refuses in a loss to compute with a part of what a module gives, but each element by itself, or in another module
    that takes it.

    parts: says it of the name of a module. plan, without: the plan in which ranks have parts, and that in which not.
    """

    def __init__(self, module: nn.Module, parts: Callable[[str], Parts], plan: str, without: str) -> None:
        super().__init__()
        self._names = {each: name for name, each in module.named_modules()}
        self._parts, self._plan, self._without = parts, plan, without
        self._given: Any = WeakIdKeyDictionary()  # tensors that were made in such a module, and its name
        self.watch(module)

    def check(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if not made:
            return
        if calls := [self._names[part] for part, _ in calls_of(self._names)]:
            name = calls[-1]  # what the loss itself has called
            parts = self._parts(name)
            if parts is Parts.GRADIENTS:
                raise self._refused(name)
            if parts is Parts.VALUES:
                self._note(made, name)
            return
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        names = [self._given[each] for each in given if each in self._given]
        if not names:
            return
        if len(given) > 1 or not _is_elementwise(func):
            raise self._refused(names[0])
        self._note(made, names[0])

    def _note(self, made: list[Tensor], name: str) -> None:
        for each in made:
            self._given[each] = name

    def _refused(self, name: str) -> UserError:
        return UserError(
            f"{self._plan}: the loss calls {name} by itself, and of what that takes or gives each rank has a part, as "
            f'the model\'s forward uses it: keep it whole (Engine(tensor_rules={{"{name}.**": "whole"}})), compute '
            f"in the model's forward what the loss computes with it, or take {self._without}"
        )


def _is_elementwise(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    overloads = [] if packet is None else packet.overloads()
    return name in _ALIKE or any(torch.Tag.pointwise in getattr(packet, each).tags for each in overloads)
