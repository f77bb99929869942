"""Weights of experts in a loss: each rank has its own experts, and would weigh them by its own part of the count."""

from __future__ import annotations

from torch import nn

from shoal.parallel.expert.dispatch import Dispatched
from shoal.parallel.weights_in_loss import WeightsInLoss


def expert_weights(module: nn.Module, ranks: int) -> WeightsInLoss:
    """Refuses in a loss, outside of `module`, to compute with weights of experts that are on this rank alone.

    ranks: those that have other experts
    """
    own = {
        f"{name}.{key}"
        for name, each in module.named_modules()
        if isinstance(each, Dispatched)
        for key, _ in each.named_parameters(recurse=False)
    }

    def why(name: str) -> str | None:
        if name not in own:
            return None
        return (
            f"plan.ep = {ranks}: the loss computes with {name}, of which each rank has the part of its own experts, "
            "and would weigh it by what it has counted itself"
        )

    return WeightsInLoss(module, why, "plan.ep = 1")
