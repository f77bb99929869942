"""Finds the experts of a model: our own, and those of `transformers`, whose modules have the same form.

router   gives each token the numbers and weights of its experts
experts  stacked matrices [E, ..]; forward(tokens [N, D], experts [N, K], weights [N, K]) -> [N, D];
         the number E stands for no expert
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shoal.errors import UserError
from shoal.module.stand_in import whole_model

ROUTERS = ("router", "gate")
"""The usual names of a router beside its experts."""


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in a model.

    name: of the module with the stacked matrices
    router: the module beside it, if it has one of the usual names. Without one tokens are counted at the experts'
        input, and balance losses under plan.cp are refused.
    number: of experts
    """

    name: str
    experts: nn.Module
    router: nn.Module | None
    number: int


def mixtures(module: nn.Module, named: Sequence[str] = ()) -> list[Mixture]:
    """Returns all mixtures of `module`, in order, also those of other pipeline stages.

    They are the modules of the form above, with as many matrices as their attribute `num_experts` says. Raises
    UserError for one of `named` that has another form.
    """
    modules = dict(whole_model(module))
    found = []
    for name, each in modules.items():
        why = unlike(each)
        if why is not None and name in named:
            raise UserError(f'{name} is "experts" by the rules: {why}')
        if why is None:
            around = modules[name.rpartition(".")[0]]
            router = next((child for key, child in around.named_children() if key in ROUTERS), None)
            found.append(Mixture(name, each, router, int(each.num_experts)))  # type: ignore[arg-type]
    return found


def unlike(module: nn.Module) -> str | None:
    """Returns why `module` is no module of stacked experts; None if it is one."""
    own = dict(module.named_parameters())
    number = getattr(module, "num_experts", None)
    if not isinstance(number, int):
        return "it does not say by `num_experts` how many there are"
    if not any(parameter.dim() == 3 for parameter in own.values()) or len(own) != len(
        list(module.parameters(recurse=False))
    ):
        return "its matrices are not stacked in parameters [experts, out, in] of its own"
    if odd := [name for name, parameter in own.items() if parameter.dim() < 2 or parameter.shape[0] != number]:
        return f"{odd[0]} {tuple(own[odd[0]].shape)} is not stacked for num_experts = {number}"
    if len(inspect.signature(module.forward).parameters) < 3:
        return "its forward does not take (tokens, experts, weights)"
    return None


def nearly(module: nn.Module) -> str:
    """Says of the first module that stacks matrices, where none has the form of experts, which and why; "" for none."""
    for name, each in whole_model(module):
        own = [tuple(parameter.shape) for parameter in each.parameters(recurse=False)]
        stacked = any(len(shape) == 3 and shape[0] > 1 for shape in own)
        if stacked and not type(each).__module__.startswith("torch.") and (why := unlike(each)) is not None:
            return f"; of {name or 'the model'}, which stacks matrices: {why}"
    return ""
