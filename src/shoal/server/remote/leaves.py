"""Parameters as one forward sees them, where an optimizer may step before its backward has come.

A module that several clients share is stepped by one of them while forwards of others wait for their backward. Each
forward therefore computes with stand-ins of the parameters, on the storage of its time; a step moves the parameters to
new storage first, if a stand-in is left. Parameters stay the objects that they are, for who refers to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Leaves:
    """A stand-in for each of `parameters`: its values, and a version counter and gradients of its own."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.of = {each: each.data.requires_grad_(each.requires_grad) for each in parameters}

    def standing_in(self) -> AbstractContextManager[Any]:
        """Has torch's functions that are called in this thread use the stand-ins."""
        return _StandIns(self.of)


class Versions:
    """The parameters of a module under forwards and steps. Not for several threads at once."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._used: WeakSet[Leaves] = WeakSet()

    def leaves(self) -> Leaves:
        """Returns stand-ins for a forward that begins. They count as used for as long as they are referred to."""
        made = Leaves(self._module.parameters())
        self._used.add(made)
        return made

    def move(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Prepares a step in place by these gradients.

        Rows of a sparse gradient are updated where they are, since a table's backward does not read it: a backward that
        does is refused by torch.
        """
        used = list(self._used)
        for parameter, gradient in gradients.items() if used else ():
            if gradient.is_sparse:
                torch.autograd.graph.increment_version([leaves.of[parameter] for leaves in used])
            else:
                parameter.data = parameter.data.clone()


class _StandIns(TorchFunctionMode):
    """Replaces tensors in arguments, also in lists and tuples of them."""

    def __init__(self, of: Mapping[nn.Parameter, Tensor]) -> None:
        super().__init__()
        self._of: Mapping[Any, Any] = of

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*map(self._swapped, args), **{name: self._swapped(each) for name, each in (kwargs or {}).items()})

    def _swapped(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return self._of.get(value, value)
        if type(value) in (list, tuple):
            return type(value)(map(self._swapped, value))
        return value
