"""The model, built whole and alike on all ranks; and what this rank has of it, in the form in which it is trained.

Nothing here holds weights: parameters are still as the factory made them, fake ones where it was recorded. So a dry run
goes the same way, in a world without other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shoal.assembly.compatibility import check_dropout, check_recompute
from shoal.assembly.ranks import Ranks
from shoal.assembly.recipe import Recipe
from shoal.comm import Group
from shoal.errors import UserError
from shoal.exchange.hooks import check_hooks, is_hooked
from shoal.module.alike import make_alike
from shoal.module.batchnorm import synchronise
from shoal.module.build import Built, build
from shoal.module.compiling import blocks, compile_blocks, nothing_to_recompute, recomputable
from shoal.module.random import Randomness, attention
from shoal.module.recompute import Recompute, without_caches
from shoal.native.heap import keep_freed_memory
from shoal.optim.groups import GroupRule, ParamGroups, group_options
from shoal.parallel.layout import Layout
from shoal.parallel.parallelized import Parted
from shoal.parallel.tensor import Rules
from shoal.pipeline import Runner, cut_into_stages
from shoal.plan import option_name
from shoal.precision import Precision, cast_at_the_border, set_products
from shoal.training.no_flush import check_unflushed


@dataclass(frozen=True)
class WholeModel:
    """A model that has been built and not yet cut.

    `groups`: its parameters by the optimizer's options; `hooked`: those on which the model's author has hooks.
    """

    built: Built
    groups: ParamGroups
    hooked: Sequence[str]


def build_alike(model: nn.Module | Callable[[], nn.Module], recipe: Recipe, ranks: Ranks) -> WholeModel:
    """Builds `model`, a factory or a ready module: the same on all ranks, which call it alike."""
    if ranks.world.device.type == "cpu":
        keep_freed_memory()
    built = build(model, recipe.seed)
    make_alike(built, ranks.world.everyone)
    return whole_model(built, recipe.param_groups)


def whole_model(built: Built, rule: GroupRule | None) -> WholeModel:
    """What has to be known of the whole of `built`, whose parameters are grouped by `rule`."""
    hooked = [name for name, parameter in built.module.named_parameters() if is_hooked(parameter)]
    return WholeModel(built, group_options(built.module.named_parameters(), rule), hooked)


@dataclass(frozen=True)
class Local:
    """The model as this rank has it.

    `built`: its module, and the initial values of what is here. `layouts[name]`: what that is of a parameter.
    `whole`: the model before it was cut.
    `parted`: what tp, cp and ep have made of it; `pipeline` runs its stages, None without pp.
    `apart`: the groups of parameters that other ranks have than the rest of what is here, by kind: "experts" (plan.ep),
    and "tied", those that the stages at the places `tied` share.
    `randomness`: what forwards draw; `recompute`: what backward computes again, None for nothing.
    """

    ranks: Ranks
    whole: WholeModel
    built: Built
    layouts: Mapping[str, Layout]
    parted: Parted
    pipeline: Runner | None
    apart: Mapping[str, Group]
    tied: Sequence[int]
    randomness: Randomness
    recompute: Recompute | None

    @property
    def module(self) -> nn.Module:
        return self.built.module

    @property
    def across(self) -> Group | None:
        """The ranks of this one's pipeline; None without pp."""
        return None if self.pipeline is None else self.pipeline.group

    @property
    def flushes(self) -> bool:
        """Whether a step ends with all its backwards (see training.no_flush)."""
        return self.pipeline is None or self.pipeline.flushes


def localize(
    model: WholeModel,
    ranks: Ranks,
    precision: Precision,
    *,
    seed: int = 0,
    rules: Rules | None = None,
    sync_bn: bool = False,
    dropout: str = "keyed",
    in_stages: bool = True,
) -> Local:
    """Makes of `model` what this rank trains; changes its module. All ranks call it alike.

    `rules`: how layers are cut, beside those that are known. `sync_bn`, `dropout`: as for `Engine`.
    `in_stages`: False leaves a rank all stages of a pipeline, for whom looks at them one by one.
    Raises UserError for a model that the plan cannot cut, on every rank alike.
    """
    plan, mesh, world = ranks.plan, ranks.mesh, ranks.world
    pipeline = cut_into_stages(model.built, plan, mesh, world) if plan.pp > 1 and in_stages else None
    elsewhere = [] if pipeline is None else pipeline.split.elsewhere
    parted = Parted(model.built, plan, mesh, world, rules, attention, elsewhere)
    check_hooks(model.hooked, parted.layouts, plan)
    tied, layouts = [], dict(parted.layouts)
    apart = {} if parted.experts is None else {"experts": ranks.group("edp", "edp")}
    if pipeline is not None:
        pipeline.split.between = [] if parted.region is None else [parted.region]
        pipeline.split.within = [] if parted.context is None else [parted.context]
        tied = _tied_stages(pipeline, plan.pp)
        layouts |= {name: layouts[name].tied for name, places in pipeline.tied.items() if places == tied}
    if tied:
        apart["tied"] = world.group(f"tied{ranks.serial}", mesh.on(tied, mesh.ranks("dp", "cp")))
    if pipeline is not None and not pipeline.flushes:
        check_unflushed(plan, precision, parted, ranks.replicas.size, sync_bn, bool(pipeline.tied))
    module = parted.built.module
    without_caches(module)
    if sync_bn:
        synchronise(module, ranks.group("dp-batchnorm", "dp"))
    check_dropout(dropout)
    attend = None if parted.context is None else parted.context.attend
    randomness = Randomness(seed, world.device, parted.parts, attend, keyed=dropout == "keyed")
    if randomness.keyed:
        randomness.take_over(module, [block for block in blocks(module) if block is not module])
    set_products(module, precision, world.device)
    if plan.compile:
        compile_blocks(module, plan.compile)
    recompute = _recompute(module, ranks, pipeline, randomness)
    cast_at_the_border(module, precision)
    return Local(ranks, model, parted.built, layouts, parted, pipeline, apart, tied, randomness, recompute)


def _tied_stages(pipeline: Runner, stages: int) -> list[int]:
    """The places of the pipeline with which this rank's shares weights, its own among them; empty if it shares none."""
    sets = {tuple(places) for places in pipeline.tied.values()}
    for place in range(stages):
        if len(several := sorted(each for each in sets if place in each)) > 1:
            raise UserError(
                f"plan.pp: weights are shared by the ranks {several} of the pipeline, and each can be in one such set: "
                f"{sorted(pipeline.tied)}; name the stages by hand (plan.stages) so that these are the same ranks, or "
                "take plan.pp = 2"
            )
    return next((list(places) for places in sets if pipeline.group.rank in places), [])


def _recompute(module: nn.Module, ranks: Ranks, pipeline: Runner | None, randomness: Randomness) -> Recompute | None:
    if option_name(ranks.plan.recompute, "recompute") == "none":
        return None
    check_recompute(ranks.plan)
    parts = recomputable(module)
    if not on_any_stage(pipeline, bool(parts)):
        raise nothing_to_recompute()
    return Recompute(parts, ranks.plan.recompute, [randomness.again] if randomness.keyed else [])


def on_any_stage(pipeline: Runner | None, here: bool) -> bool:
    """Whether it is so on any rank of the pipeline, which all call it alike."""
    if pipeline is None:
        return here
    return bool(pipeline.group.all_reduce(torch.tensor(int(here)), "max", purpose="stages"))
