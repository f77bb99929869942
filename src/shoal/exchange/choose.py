"""From a plan to its algorithm, which goes with everything else that was chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from shoal.comm import Group
from shoal.exchange.algorithm import Algorithm
from shoal.exchange.apart import Apart, check_experts, check_stages
from shoal.exchange.named import algorithm
from shoal.exchange.sharding import check_clip_value, check_cut_model, check_masters, check_sharding, check_shared_rows
from shoal.plan import Plan

Among = Callable[[Group, str, Sequence[int]], Group]
"""Makes a further group of some of the ranks of a group, by their places."""
MakeOptimizer = Callable[[], torch.optim.Optimizer]


def check_exchange(plan: Plan, keep: str, clip_value: float | None = None, make: MakeOptimizer | None = None) -> Algorithm:
    """The algorithm of `plan.exchange`, for the optimizer that `make` makes a small one of. UserError where it does not go with the rest of the plan, masters that rest as `keep`
    says, or a clipped element."""
    option, chosen = plan.exchange, algorithm(plan.exchange)
    if make is not None:
        chosen.suits(make)
    if plan.zero or plan.memory is not None:
        check_sharding(chosen, option, plan.zero, plan.memory is not None)
    if plan.cp > 1:
        check_shared_rows(chosen, option, plan.cp)
    if plan.tp > 1:
        check_cut_model(chosen, option)
    if plan.ep > 1:
        check_experts(chosen, option)
    if plan.pp > 1:
        check_stages(chosen, option)
    if keep != "whole":
        check_masters(chosen, option, keep)
    if clip_value is not None:
        check_clip_value(chosen, option, clip_value)
    return chosen


def choose_exchange(
    plan: Plan, keep: str, clip_value: float | None, apart: Mapping[str, Group], among: Among, make: MakeOptimizer
) -> Algorithm:
    """The same; with one more of its kind for each set of ranks that have something `apart` (see parallel.layout)."""
    chosen = check_exchange(plan, keep, clip_value, make)
    if not apart:
        return chosen
    return Apart(usual=chosen, apart={kind: algorithm(plan.exchange) for kind in apart}, groups=apart, among=among)
