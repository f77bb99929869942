"""What does not go together, of a plan and a way to train. Refusals only, the same on every rank, each with its reason
and a remedy.

`CONFLICTS` are those that can be told from plan and recipe alone. The parts that a plan names refuse what they cannot
do themselves, when they are made: exchange algorithms (`exchange.choose`), what is cut (`parallel`), schedules
(`pipeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.assembly.recipe import Recipe
from shoal.errors import UserError
from shoal.exchange import Algorithm, Holds
from shoal.optim.groups import needs_whole_parameters
from shoal.parallel.context import Context
from shoal.parallel.tensor import check_rules
from shoal.pipeline import Runner
from shoal.plan import Plan, option_name
from shoal.precision import Precision
from shoal.training.norms import check_by_name

FAR = 10**9
"""A step by which an exchange does what it comes to in the end."""


@dataclass(frozen=True)
class Asked:
    """A plan with a recipe. `options`: of the optimizer's groups."""

    plan: Plan
    recipe: Recipe
    options: list[dict[str, Any]]

    @property
    def cut(self) -> str | None:
        """The first axis along which a rank has parts of parameters."""
        return next((axis for axis in ("tp", "ep") if getattr(self.plan, axis) > 1), None)

    @property
    def parts(self) -> str:
        """What a rank has along `cut`."""
        return "each matrix" if self.cut == "tp" else "what stacks experts"

    @property
    def whole_parameters(self) -> bool:
        """Whether the optimizer looks at whole parameters."""
        return needs_whole_parameters(self.recipe.optimizer, self.options, self.recipe.precision.master)


CONFLICTS: tuple[tuple[Callable[[Asked], bool], str], ...] = (
    (
        lambda asked: asked.plan.tp > 1 and asked.recipe.precision.fp8,
        'plan.tp > 1 does not go with precision = "fp8" yet: its products take whole matrices',
    ),
    (
        lambda asked: asked.cut is not None and asked.whole_parameters,
        "plan.{asked.cut} > 1 leaves each rank a part of {asked.parts}, and this optimizer looks at whole parameters: "
        "take an elementwise one (AdamW, SGD), or plan.dp",
    ),
    (
        lambda asked: asked.plan.cp > 1 and asked.recipe.sync_bn,
        "plan.cp > 1 does not go with sync_bn, which makes each rank's share of the samples one microbatch",
    ),
)


def check(plan: Plan, recipe: Recipe, module: nn.Module, options: list[dict[str, Any]]) -> None:
    """Raises UserError for the first of `CONFLICTS` that there is, and for rules that name nothing in `module`."""
    asked = Asked(plan, recipe, options)
    for conflicts, why in CONFLICTS:
        if conflicts(asked):
            raise UserError(why.format(asked=asked))
    check_rules(module, recipe.tensor_rules or {})


def check_dropout(dropout: str) -> None:
    """Raises UserError for a way to draw that there is not."""
    if dropout not in ("keyed", "fused"):
        raise UserError(
            f'dropout = "{dropout}": "keyed" drops the same under every plan, "fused" uses torch\'s kernels'
        )


def check_recompute(plan: Plan) -> None:
    """Raises UserError where the operations that are to be kept are inside compiled blocks."""
    if plan.compile and option_name(plan.recompute, "recompute") == "selective":
        raise UserError(
            'plan.recompute = "selective" sees no operations inside compiled blocks: take another, or compile = false'
        )


def check_trainable(any_is: bool) -> None:
    """Raises UserError for a model in which nothing is trained."""
    if not any_is:
        raise UserError("the model has no parameter with requires_grad: there is nothing to train")


def check_schedule(scheduler: Any) -> None:
    """Raises UserError for a scheduler that a step cannot call."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UserError(
            "ReduceLROnPlateau needs a metric at each step, which the engine does not have: lower the lr from your own "
            "loop"
        )


def check_gradients_by_name(plan: Plan, recipe: Recipe, exchange: Algorithm, flushes: bool) -> None:
    """Raises UserError where something asks for gradients by name, and ranks do not have the same ones."""
    same = exchange.holds(0) in (Holds.SUM, Holds.MEAN) and not exchange.drifts(FAR)
    by_name: Mapping[str, Any] = {
        "clip by a function": callable(recipe.clip),
        "keep_gradients": recipe.keep_gradients,
        "norms_every": recipe.norms_every,
    }
    for what, wanted in by_name.items():
        if wanted:
            check_by_name(what, plan, not flushes, same)


def check_loop(microbatches: int, precision: Precision, pipeline: Runner | None, context: Context | None) -> None:
    """Raises UserError where a loop of the caller's cannot do what the engine's does."""
    if microbatches > 1 and precision.grad == torch.bfloat16:
        raise UserError(
            f"loop({microbatches}): gradients of several microbatches are sums, which bf16 would round: give the "
            f"engine global_batch = {microbatches} x microbatch"
        )
    if pipeline is not None:
        raise UserError(
            "plan.pp > 1 runs forwards and backwards by a schedule: train with engine.step, not with a loop of your own"
        )
    if context is not None:
        raise UserError(
            "plan.cp > 1 shares out the tokens of batches that the engine loads: train with engine.step, not with a "
            "loop of your own"
        )


def check_objective(pipeline: Runner | None) -> None:
    """Raises UserError where no rank can compute the loss as a function of all parameters."""
    if pipeline is not None:
        raise UserError("plan.pp > 1: no rank has all parameters, of which the objective is a function")
