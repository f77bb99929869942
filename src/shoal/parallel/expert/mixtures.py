"""Where a model has experts: our own, and those of `transformers`, whose modules are alike.

router   gives each token the numbers and weights of its experts
experts  stacked matrices [E, ..]; forward(tokens [N, D], experts [N, K], weights [N, K]) -> [N, D]; the number E stands for none
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

ROUTERS = ("router", "gate")
"""What a router is called beside its experts."""


@dataclass(frozen=True)
class Mixture:
    """`name`: of the module with the stacked matrices, `number` of them. `router`: the module beside it, if it has one by a usual name."""

    name: str
    experts: nn.Module
    router: nn.Module | None
    number: int


def mixtures(module: nn.Module, named: Sequence[str] = ()) -> list[Mixture]:
    """All of `module`, in order: modules whose own parameters are stacked for as many experts as their attribute `num_experts` says, and those `named`."""
    modules = dict(module.named_modules())
    found = []
    for name, each in modules.items():
        own = [parameter for _, parameter in each.named_parameters(recurse=False)]
        said = getattr(each, "num_experts", None)
        stacked = bool(own) and all(parameter.dim() > 1 and parameter.shape[0] == said for parameter in own)
        stacked = stacked and any(parameter.dim() == 3 for parameter in own)
        if stacked or name in named:
            around = modules[name.rpartition(".")[0]]
            router = next((child for key, child in around.named_children() if key in ROUTERS), None)
            found.append(Mixture(name, each, router, own[0].shape[0] if own else 0))
    return found
