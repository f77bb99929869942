"""The model, built whole and alike on all ranks; and what this rank has of it, in the form in which it is trained.

Nothing here holds weights: parameters are still as the factory made them, fake ones where it was recorded. So a dry run
goes the same way, in a world without other ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shoal.assembly.arguments import check_alike
from shoal.assembly.compatibility import check_no_flush, check_recompute
from shoal.assembly.ranks import Ranks
from shoal.assembly.recipe import Recipe
from shoal.chunks.adopt import check_free
from shoal.comm import Group
from shoal.errors import UserError
from shoal.exchange.hooks import check_hooks, is_hooked, sees_sums
from shoal.models.adapted import check_adapters
from shoal.module.ahead import build_ahead
from shoal.module.alike import make_alike
from shoal.module.batchnorm import has_batch_statistics, synchronise
from shoal.module.border import cast_at_the_border
from shoal.module.build import Built
from shoal.module.compiling import (
    blocks,
    compile_blocks,
    graphs,
    nothing_to_recompute,
    numbered_parts,
    numbers_of,
    recomputable,
)
from shoal.module.random import Randomness, attention
from shoal.module.recompute import Recompute, without_caches
from shoal.module.scripted import check_scripted
from shoal.native.heap import keep_freed_memory
from shoal.optim.groups import GroupRule, ParamGroups, group_options
from shoal.parallel.axis import Axis
from shoal.parallel.layout import Layout
from shoal.parallel.parallelized import Parallelized
from shoal.parallel.tensor import Rules, cuts_of
from shoal.parallel.tensor.axis import confirming
from shoal.pipeline import Runner, cut_into_stages
from shoal.pipeline.axis import PipelineParallel, why_no_hook
from shoal.plan import option_name
from shoal.precision import Precision, set_products


@dataclass(frozen=True)
class WholeModel:
    """A model that has been built and not yet cut.

    `groups`: its parameters by the optimizer's options; `hooked`: those on which the model's author has hooks,
    `summed`: those of them with one on the accumulated gradient.
    """

    built: Built
    groups: ParamGroups
    hooked: Sequence[str]
    summed: Sequence[str]


def build_alike(model: nn.Module | Callable[[], nn.Module], recipe: Recipe, ranks: Ranks) -> WholeModel:
    """Builds `model`, a factory or a ready module: the same on all ranks, which call it alike."""
    return whole_model(built_alike(model, recipe, ranks), recipe.param_groups)


def built_alike(model: nn.Module | Callable[[], nn.Module], recipe: Recipe, ranks: Ranks) -> Built:
    """Builds as `build_alike`, before anything is asked of the model."""
    if ranks.world.device.type == "cpu":
        keep_freed_memory()
    try:
        built = build_ahead(model, recipe.seed)
        check_free(built.module)
    except UserError as error:  # ranks that join would wait for those that go on and refuse their model
        check_alike(recipe, ranks.world.everyone, error)
        raise
    check_alike(recipe, ranks.world.everyone)
    make_alike(built, ranks.world.everyone)
    if ranks.world.rank == 0:
        _tell_of_extra_state(built.module)
    return built


def _tell_of_extra_state(module: nn.Module) -> None:
    for name, each in module.named_modules():
        if type(each).get_extra_state is not nn.Module.get_extra_state:
            warnings.warn(
                f"{name or 'the model'} ({type(each).__name__}) has extra state (get_extra_state), which no checkpoint "
                "has: a run that goes on from one begins with what the factory gives. Keep it in a buffer, or in an "
                "object that engine.state(name, ...) is given",
                stacklevel=5,
            )
            return


def whole_model(built: Built, rule: GroupRule | None) -> WholeModel:
    """What has to be known of the whole of `built`, whose parameters are grouped by `rule`. Raises UserError for
    adapters of single parameters."""
    check_adapters(built.module)
    named = dict(built.module.named_parameters())
    hooked = [name for name, parameter in named.items() if is_hooked(parameter)]
    summed = [name for name in hooked if sees_sums(named[name])]
    return WholeModel(built, group_options(named.items(), rule), hooked, summed)


@dataclass(frozen=True)
class Local:
    """The model as this rank has it.

    `built`: its module, and the initial values of what is here. `layouts[name]`: what that is of a parameter.
    `whole`: the model before it was cut.
    `axes`: those along which there are several ranks, innermost first.
    `parallelized`: what the axes inside a stage have made of it; `pipeline` runs its stages, None where it has all.
    `apart`: the groups of parameters that other ranks have than the rest of what is here, by kind: "experts", and
    "tied", those that the stages at the places `tied` share.
    `randomness`: what forwards draw; `recompute`: what backward computes again, None for nothing.
    """

    ranks: Ranks
    whole: WholeModel
    built: Built
    layouts: Mapping[str, Layout]
    axes: tuple[Axis, ...]
    parallelized: Parallelized
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
        """The ranks of this one's pipeline; None where it has all stages."""
        return next((axis.group for axis in self.axes if axis.cuts_layers), None)

    @property
    def flushes(self) -> bool:
        """Whether a step ends with all its backwards (see training.no_flush)."""
        return all(axis.flushes for axis in self.axes)


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
    # of the whole model, before it is cut into stages
    numbered = numbered_parts(model.built.module)
    cuts = cuts_of(model.built.module, plan.tp, rules, confirming(mesh, world), plan.placements)
    pipeline = cut_into_stages(model.built, plan, mesh, world) if in_stages else None
    elsewhere = [] if pipeline is None else pipeline.split.elsewhere
    parallelized = Parallelized(model.built, plan, mesh, world, cuts, attention, elsewhere)
    built, module = parallelized.built, parallelized.built.module
    axes: list[Axis] = [*parallelized.axes]
    if pipeline is not None:
        pipeline.split.follow(axes)
        axes.append(PipelineParallel(mesh, world, pipeline, ranks.serial))
    check_hooks(model.hooked, parallelized.layouts, axes, why_no_hook(mesh.size(PipelineParallel.name)))
    layouts: Mapping[str, Layout] = parallelized.layouts
    for axis in axes:
        layouts = axis.relaid(layouts)
    apart = {kind: ranks.own(group) for axis in axes for kind, group in axis.variants.items()}
    tied = [index for axis in axes for index in axis.tied]
    if pipeline is not None and not pipeline.flushes:
        statistics = has_batch_statistics(module)
        check_no_flush(plan, precision, statistics, sync_bn, parallelized.moves_biases, bool(pipeline.tied))
    without_caches(module)
    if sync_bn:
        synchronise(module, ranks.group("samples", "batchnorm"))
    _check_dropout(dropout)
    check_scripted(module, plan.replicas)
    attend = None if parallelized.context is None else parallelized.context.attend
    randomness = Randomness(seed, world.device, parallelized.parts, attend, keyed=dropout == "keyed")
    if randomness.keyed:
        randomness.take_over(module, [block for block in blocks(module) if block is not module])
    set_products(module, precision, world.device)
    closed = [*graphs(module, by_plan=False), *(block for block in blocks(module) if block is not module)]
    if plan.compile:
        compile_blocks(module, plan.compile)
    recompute = _recompute(module, numbered, ranks, axes, randomness)
    cast_at_the_border(module, precision, closed)
    return Local(ranks, model, built, layouts, tuple(axes), parallelized, pipeline, apart, tied, randomness, recompute)


def _check_dropout(dropout: str) -> None:
    """Raises UserError for a way to draw that there is not."""
    if dropout not in ("keyed", "fused"):
        raise UserError(
            f'dropout = "{dropout}": "keyed" drops the same under every plan, "fused" uses torch\'s kernels'
        )


def _recompute(
    module: nn.Module, numbered: Mapping[str, int], ranks: Ranks, axes: Sequence[Axis], randomness: Randomness
) -> Recompute | None:
    if option_name(ranks.plan.recompute, "recompute") == "none":
        return None
    check_recompute(ranks.plan)
    parts = recomputable(module)
    if not anywhere(axes, bool(parts)):
        raise nothing_to_recompute()
    again = [randomness.again] if randomness.keyed else []
    numbers = numbers_of(module, parts, numbered)
    return Recompute(parts, ranks.plan.recompute, again, numbers, len(numbered), ranks.plan.compile)


def anywhere(axes: Iterable[Axis], here: bool) -> bool:
    """Returns whether it is so on any rank along `axes`, which all call it alike."""
    for axis in axes:
        here = any(axis.gather_seen(here))
    return here
