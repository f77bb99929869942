"""A module as a function of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoal.module.in_place import in_place

T = TypeVar("T")
Place = tuple[dict[str, Any], str, Any]
"""A table of a module, a key there, and what it has."""


def call_with(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    run: Callable[[], T],
    others: Sequence[tuple[Tensor, Tensor]] = (),
) -> T:
    """Returns what `run` does, in which `module` has `parameters` in place of its own, wherever its code, or a loss,
    has those from: the module, a list, a closure. `others`: further tensors, and what is in place of each.

    torch.func.functional_call alone (torch 2.13) leaves those that were given in a module that is registered under two
    names: it puts back what it found under the second one, after the first.
    """
    named = module.named_parameters(remove_duplicate=False)
    pairs = [*((own, parameters[name]) for name, own in named if name in parameters), *others]
    tables = weights_of(module)
    given = {f"module.{name}": value for name, value in parameters.items()}
    try:
        around = _Around(module, in_place(pairs)(run))
        return torch.func.functional_call(around, given, ())
    finally:
        for table, key, value in tables:
            if dict.get(table, key) is not value:
                dict.__setitem__(table, key, value)


class _Around(nn.Module):
    """A module whose forward is what `run` does with `module`."""

    def __init__(self, module: nn.Module, run: Callable[[], Any]) -> None:
        super().__init__()
        self.module, self._run = module, run

    def forward(self) -> Any:
        return self._run()


def weights_of(module: nn.Module) -> list[Place]:
    """Returns what `module` has for parameters now, each with its table and its key there: inside such a call other
    tensors."""
    tables = [table for each in module.modules() if isinstance(table := each._parameters, dict)]
    return [(table, key, value) for table in tables for key, value in dict.items(table)]  # asked for, they would come


def weights_as_found(module: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Returns what makes contexts in which `module` has the parameters that it has now, each trained or frozen as it is
    now."""
    weights = weights_of(module)
    trained = [(value, value.requires_grad) for *_, value in weights if value is not None]

    @contextmanager
    def found() -> Iterator[None]:
        others = [(table, key, now) for table, key, value in weights if (now := dict.get(table, key)) is not value]
        changed = [(value, flag) for value, flag in trained if value.requires_grad != flag]
        for table, key, value in weights if others else ():
            dict.__setitem__(table, key, value)
        for value, flag in changed:
            value.requires_grad_(flag)
        try:
            yield
        finally:
            for value, flag in changed:
                value.requires_grad_(not flag)
            for table, key, value in others:
                dict.__setitem__(table, key, value)

    return found
