"""Makes the algorithm of a plan and checks that it goes with everything else that was chosen."""

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
"""Makes another group of some ranks of a group, given a name and their ranks in it."""
MakeOptimizer = Callable[[], torch.optim.Optimizer]


def check_exchange(
    plan: Plan, keep: str, clip_value: float | None = None, make: MakeOptimizer | None = None
) -> Algorithm:
    """Returns the algorithm of `plan.exchange`. Raises UserError where it does not go with the rest.

    - `plan`: the plan
    - `keep`: how masters are kept between steps
    - `clip_value`: bound of each gradient element, or None
    - `make`: makes a small optimizer of the kind used, or None
    """
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
    """Returns the algorithm of `plan.exchange`, with another one of its kind for each variant of parameters.

    `apart`: the ranks that share each variant (see parallel.layout); `among`: makes groups of some of them. The other
    parameters are those of `check_exchange`.
    """
    chosen = check_exchange(plan, keep, clip_value, make)
    if not apart:
        return chosen
    return Apart(usual=chosen, apart={kind: algorithm(plan.exchange) for kind in apart}, groups=apart, among=among)
