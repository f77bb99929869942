"""Closed forms for the bytes of a rank: what ZeRO, stages and tiers leave of weights, gradients, masters and optimizer
state, and the activations of the microbatches under way. A plan that is chosen is run dry besides, which counts all."""

from __future__ import annotations

import math

from shoal.planner.costs import Prices, Sizes
from shoal.planner.task import Choice


def elements(own: Sizes, tied: float) -> tuple[float, float, float]:
    """Elements of a rank: weights and trained ones outside of experts, and experts."""
    return max(0.0, own.weights - tied - own.experts), max(0.0, own.trained - tied - own.experts), own.experts


def tied_elements(prices: Prices) -> float:
    """Elements that parts of the model share, which a rank with all of it has once."""
    profile = prices.task.profile
    return max(0.0, math.fsum(part.weights.value for part in profile.parts) - profile.parameters)


def copies(choice: Choice) -> tuple[int, int]:
    """Among how many ranks ZeRO cuts the state, and that of experts."""
    together = (choice.shard or choice.spread.copies) * choice.spread.tokens
    return together, max(1, together // choice.spread.experts)


def resting(prices: Prices, choice: Choice, own: Sizes, tied: float) -> tuple[dict[str, float], float]:
    """Bytes by role that a rank keeps all the time on its device, and those at home on the host."""
    numbers, (among, with_experts) = prices.task.numbers, copies(choice)
    weights, trained, experts = elements(own, tied)
    cut = {role: choice.zero >= stage for role, stage in (("state", 1), ("gradients", 2), ("weights", 3))}

    def kept(plain: float, stacked: float, is_cut: bool) -> float:
        return plain / among + stacked / with_experts if is_cut else plain + stacked

    roles = {
        "weights": numbers.weight * kept(weights, experts, cut["weights"]),
        "gradients": numbers.gradient * kept(trained, experts, cut["gradients"]),
        "masters": numbers.master * kept(trained, experts, cut["state"]),
        "optimizer state": numbers.state * kept(trained, experts, cut["state"]),
    }
    if not choice.offload:
        return roles, 0.0
    return dict.fromkeys(roles, 0.0), math.fsum(roles.values())


def standing(prices: Prices, choice: Choice, whole: Sizes, last: bool, tied: float) -> tuple[dict[str, float], float]:
    """Bytes by role of a rank with the stages `whole` on its device, all but activations, and those on the host.
    `last`: it has the last stage."""
    spread, rows = choice.spread, choice.microbatch
    roles, host = resting(prices, choice, whole, tied if spread.stages == 1 else 0.0)
    temporaries = prices.task.profile.temporaries.on(spread)
    passes = choice.zero == 3 or choice.offload  # one piece is at work, and one on its way
    roles["weights in use"] = 2 * prices.task.numbers.weight * whole.in_use if passes else 0.0
    roles["temporaries"] = rows * (temporaries if last else min(temporaries, whole.largest))
    return roles, host
