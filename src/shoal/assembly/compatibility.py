"""What does not go together, of a plan and a way to train. Refusals only, the same on every rank, each with its reason
and a remedy: `CONFLICTS` of plan and recipe, `EXCHANGES` of an algorithm, by what it says of itself.

A model that cannot be cut is refused where that is found out (`parallel`, `pipeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.assembly.recipe import Recipe
from shoal.errors import UserError
from shoal.exchange import Algorithm, Holds
from shoal.exchange.named import algorithm
from shoal.module.selective import selects
from shoal.optim.groups import OptimizerFactory, needs_whole_parameters
from shoal.parallel.tensor import check_placements, check_rules
from shoal.plan import Plan, option_name
from shoal.precision import Precision

FAR = 10**9
"""A step by which an exchange does what it comes to in the end."""


@dataclass(frozen=True)
class Asked:
    """A plan with what of a recipe matters to it. `options`: of the optimizer's groups."""

    plan: Plan
    optimizer: OptimizerFactory
    precision: Precision
    options: Sequence[Mapping[str, Any]]
    sync_bn: bool = False

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
        return needs_whole_parameters(self.optimizer, self.options, self.precision.master)


CONFLICTS: tuple[tuple[Callable[[Asked], bool], str], ...] = (
    (
        lambda asked: asked.plan.tp > 1 and asked.precision.fp8,
        'plan.tp > 1 does not go with precision = "fp8" yet: its products take whole matrices',
    ),
    (
        lambda asked: asked.cut is not None and asked.whole_parameters,
        "plan.{asked.cut} > 1 leaves each rank a part of {asked.parts}, and this optimizer looks at whole parameters: "
        "take an elementwise one (AdamW, SGD), or plan.dp",
    ),
    (
        lambda asked: asked.plan.cp > 1 and asked.sync_bn,
        "plan.cp > 1 does not go with sync_bn, which makes each rank's share of the samples one microbatch",
    ),
)


def check_conflicts(asked: Asked) -> None:
    """Raises UserError for the first of `CONFLICTS` that there is."""
    if (why := next((why for conflicts, why in CONFLICTS if conflicts(asked)), None)) is not None:
        raise UserError(why.format(asked=asked))


def check(plan: Plan, recipe: Recipe, module: nn.Module, options: list[dict[str, Any]]) -> None:
    """Raises UserError for the first of `CONFLICTS` that there is, for rules that name nothing in `module`, for weights
    that a forward changes and that lie elsewhere too, and for gradients that another process has, times a loss
    scale."""
    check_conflicts(Asked(plan, recipe.optimizer, recipe.precision, options, recipe.sync_bn))
    check_rules(module, recipe.tensor_rules or {})
    check_placements(module, plan.placements or {})
    elsewhere = plan.size > 1 or recipe.precision.low or plan.memory is not None
    for name, each in module.named_modules():
        if recipe.precision.scaling is not None and getattr(each, "elsewhere", False):
            raise UserError(
                f"{name or 'the model'} is a remote module: its owner would have gradients times the loss scale of "
                'this precision. Take "bf16" or "fp32"'
            )
        if elsewhere and isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None:
            raise UserError(
                f"{name} has max_norm: a forward changes rows of the weight, which other ranks, fp32 masters and the "
                "host would not have. Scale what it returns instead, or take one rank in fp32 without plan.memory"
            )


@dataclass(frozen=True)
class Exchange:
    """The exchange of a plan, and what it has to go with.

    `keep`: how masters are kept between steps. `clip_value`: bound of each gradient element, or None. `moves_biases`:
    routers balance by a bias.
    """

    plan: Plan
    its: Algorithm
    keep: str
    clip_value: float | None
    moves_biases: bool

    @property
    def name(self) -> str:
        return f'plan.exchange = "{option_name(self.plan.exchange, "exchange")}"'

    @property
    def shards(self) -> str:
        """What keeps on one rank what each replica has otherwise; "" for nothing."""
        return "plan.memory" if self.plan.memory is not None else f"plan.zero = {self.plan.zero}" * bool(self.plan.zero)

    @property
    def reduces_early(self) -> bool:
        """Whether gradients are reduced before a step's are whole."""
        return self.plan.zero >= 2 or self.plan.memory is not None

    @property
    def weighs_alike(self) -> bool:
        """Whether replicas count alike in what is exchanged, whatever samples they have had."""
        its = self.its
        averages = its.holds(FAR) in (Holds.MEAN, Holds.LOCAL_MEAN, Holds.INDEPENDENT)
        return averages or its.trains_apart or its.own_optimizers or its.updates_itself

    @property
    def parts_rows(self) -> bool:
        """Whether ranks that share rows would train apart."""
        return bool(getattr(self.its, "ranks", 1) % self.plan.cp)


NOT_WITH = "{asked.name} does not go with "
EXCHANGES: tuple[tuple[Callable[[Exchange], Any], str], ...] = (
    (
        lambda asked: asked.shards and asked.its.trains_apart,
        NOT_WITH + "{asked.shards}: its replicas train apart, so each needs all of its own weights and optimizer state",
    ),
    (
        lambda asked: asked.shards and asked.its.updates_itself,
        NOT_WITH + "{asked.shards}: it updates every parameter on every replica itself",
    ),
    (
        lambda asked: asked.reduces_early and asked.its.holds_otherwise,
        NOT_WITH
        + "{asked.shards}: it works on the whole gradient of a step, which is reduced microbatch by microbatch",
    ),
    (
        lambda asked: asked.shards and asked.its.own_optimizers,
        NOT_WITH
        + "{asked.shards}: each replica's optimizer goes by its own gradients, so each needs all of its state; "
        'of = "gradients" combines gradients instead',
    ),
    (
        lambda asked: asked.plan.shares and asked.weighs_alike,
        NOT_WITH + "plan.shares: it weighs replicas alike, however many samples each has: leave shares out, or take an "
        "exchange that sums gradients",
    ),
    (lambda asked: asked.plan.cp > 1 and asked.its.of_whole_rows, NOT_WITH + "plan.cp: {asked.its.of_whole_rows}"),
    (
        lambda asked: asked.plan.cp > 1 and asked.parts_rows and asked.its.trains_apart,
        "{asked.name} lets ranks train apart that share each row (plan.cp = {asked.plan.cp}): take "
        '{{name = "islands", ranks = {asked.plan.cp}}}, or one that keeps replicas equal',
    ),
    (
        lambda asked: asked.plan.tp > 1 and asked.its.of_whole_models,
        NOT_WITH + "a model that is cut (plan.tp): {asked.its.of_whole_models}",
    ),
    (
        lambda asked: asked.plan.ep > 1 and asked.its.trains_apart,
        NOT_WITH + "plan.ep: its replicas train apart, and tokens of one would go to experts of another",
    ),
    (
        lambda asked: asked.plan.ep > 1 and asked.its.updates_itself,
        NOT_WITH
        + "plan.ep: it averages each replica's own gradients, and those of experts come from tokens of several",
    ),
    (
        lambda asked: asked.plan.ep > 1 and getattr(asked.its, "ranks_per_host", None) is not None,
        NOT_WITH + "plan.ep: ranks_per_host counts replicas of the model, and experts have fewer: leave it out, and "
        "hosts count as they are",
    ),
    (lambda asked: asked.plan.ep > 1 and asked.its.of_whole_models, NOT_WITH + "plan.ep: {asked.its.of_whole_models}"),
    (
        lambda asked: asked.plan.pp > 1 and asked.its.trains_apart,
        NOT_WITH + "plan.pp: its replicas train apart, each with a norm and a vote of its own, and a stage has a part "
        "of a replica",
    ),
    (
        lambda asked: asked.plan.pp > 1 and (asked.its.holds_otherwise or asked.its.updates_itself),
        NOT_WITH + "plan.pp: it weighs each replica's gradients by their own mean, and only the last stage knows what "
        "counts",
    ),
    (lambda asked: asked.plan.pp > 1 and asked.its.of_whole_models, NOT_WITH + "plan.pp: {asked.its.of_whole_models}"),
    (
        lambda asked: asked.keep != "whole" and (asked.its.trains_apart or asked.its.own_optimizers),
        '{asked.name} exchanges fp32 weights, which precision master = "{asked.keep}" does not keep',
    ),
    (
        lambda asked: asked.clip_value is not None and not asked.clip_value > 0,
        "clip_value = {asked.clip_value}: give a number above 0, or None for no clipping",
    ),
    (
        lambda asked: asked.clip_value is not None and asked.its.updates_itself,
        "{asked.name} updates by itself, without clip_value: use clip",
    ),
    (
        lambda asked: asked.moves_biases and asked.its.trains_apart,
        "{asked.name} lets replicas train apart, and routers with balance_rate follow the counts of all of them: take "
        "a balance loss instead",
    ),
)


def check_exchange(
    plan: Plan,
    keep: str,
    clip_value: float | None = None,
    make: Callable[[], torch.optim.Optimizer] | None = None,
    moves_biases: bool = False,
) -> Algorithm:
    """Returns the algorithm of `plan.exchange`. Raises UserError for the first of `EXCHANGES` that there is.

    `make`: makes a small optimizer of the kind used, or None. The other parameters are those of `Exchange`.
    """
    chosen = algorithm(plan.exchange)
    if make is not None:
        chosen.suits(make)
    chosen.check_ranks(plan.replicas)
    asked = Exchange(plan, chosen, keep, clip_value, moves_biases)
    if (why := next((why for conflicts, why in EXCHANGES if conflicts(asked)), None)) is not None:
        raise UserError(why.format(asked=asked))
    return chosen


def _first(reasons: Mapping[str, Any]) -> str | None:
    """Returns the first of `reasons` that there is."""
    return next((why for why, so in reasons.items() if so), None)


def check_no_flush(
    plan: Plan, precision: Precision, statistics: bool, sync_bn: bool, moves_biases: bool, tied: bool
) -> None:
    """Raises UserError for what does not go with a schedule without a flush.

    `statistics`: the model has BatchNorm. `moves_biases`: routers balance by a bias. `tied`: stages share weights.
    """
    name = option_name(plan.schedule, "schedule")
    each = name == "pipedream"
    reasons = {
        f"plan.zero = {plan.zero} keeps no whole gradient": plan.zero >= 2,
        "ranks that send each other tokens (plan.ep) run their forwards together": plan.ep > 1,
        "routers that balance by a bias (balance_rate) follow the counts at the end of a step": moves_biases,
        "sync_bn, and BatchNorm on several replicas, agree at the end of a step": sync_bn
        or (plan.replicas > 1 and statistics),
        f"masters that rest ({precision.keep}) lie in the weights": precision.keep != "whole",
        "its stages update at different times, and the loss scale is of all": each and precision.scaling is not None,
        "its stages update at different times, and some of them share weights": each and tied,
    }
    if (why := _first(reasons)) is not None:
        raise UserError(
            f'plan.schedule = "{name}" has no flush: {why}. Take one with a flush, such as 1f1b, or leave that out'
        )


def check_recompute(plan: Plan) -> None:
    """Raises UserError where operations inside compiled blocks are to be kept that are no single graph."""
    cut = [f"{axis} = {getattr(plan, axis)}" for axis in ("tp", "cp", "ep") if getattr(plan, axis) > 1]
    if plan.compile and selects(plan.recompute) and cut:
        raise UserError(
            f'plan.recompute = "selective" keeps nothing of compiled blocks beside {cut[0]}, whose calls break their '
            'graph: take "full", or compile = false'
        )


def check_gradients_by_name(plan: Plan, what: str | None, exchange: Algorithm, flushes: bool) -> None:
    """Raises UserError where `what`, if anything, asks for gradients by name, and ranks do not have the same ones."""
    same = exchange.holds(0) in (Holds.SUM, Holds.MEAN) and not exchange.drifts(FAR)
    named, schedule = option_name(plan.exchange, "exchange"), option_name(plan.schedule, "schedule")
    reasons = {
        f'plan.exchange = "{named}" leaves each replica a gradient of its own': not same,
        f"plan.ep = {plan.ep} leaves experts to some of the ranks": plan.ep > 1,
        f'plan.schedule = "{schedule}" has no flush, and its stages update by themselves': not flushes,
    }
    why = _first(reasons)
    if what is not None and why is not None:
        raise UserError(f"{what} takes gradients that all ranks have alike, and {why}: leave one of them out")
