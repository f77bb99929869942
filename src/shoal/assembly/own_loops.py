"""What a loop of the caller's, or the loss as a function, cannot have. Refusals only, the same on every rank."""

from __future__ import annotations

import torch

from shoal.errors import UserError
from shoal.plan import Plan
from shoal.precision import Precision


def check_loop(plan: Plan, microbatches: int, precision: Precision) -> None:
    """Raises UserError where a loop of the caller's cannot do what the engine's does."""
    if microbatches > 1 and precision.grad == torch.bfloat16:
        raise UserError(
            f"loop({microbatches}): gradients of several microbatches are sums, which bf16 would round: give the "
            f"engine global_batch = {microbatches} x microbatch"
        )
    if plan.pipelined:
        raise UserError(
            "plan.pp > 1 runs forwards and backwards by a schedule: train with engine.step, not with a loop of your own"
        )
    if plan.cp > 1:
        raise UserError(
            "plan.cp > 1 shares out the tokens of batches that the engine loads: train with engine.step, not with a "
            "loop of your own"
        )


def check_objective(plan: Plan) -> None:
    """Raises UserError where no rank can compute the loss as a function of all parameters."""
    if plan.pipelined:
        raise UserError("plan.pp > 1: no rank has all parameters, of which the objective is a function")
