"""What an assembled engine is used for beside its steps: a checkpoint's session, evaluation, an objective, a loop of the caller's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from shoal.assembly.compatibility import check_loop, check_objective
from shoal.assembly.memory import Memory
from shoal.assembly.model import Local
from shoal.assembly.recipe import Recipe
from shoal.assembly.trainer import Trainer, lockstep
from shoal.checkpoint.session import Members, Session, State
from shoal.checkpoint.state import Standing
from shoal.data import Batch
from shoal.pipeline import Whole
from shoal.training.evaluation import Evaluation, evaluate
from shoal.training.loop import Loop
from shoal.training.loss import Loss
from shoal.training.objective import Objective


def session(local: Local, memory: Memory, trainer: Trainer, recipe: Recipe, closing: ExitStack) -> Session:
    """What saves and reads the state of the run."""
    ranks, parted = local.ranks, local.parted
    members = Members(
        ranks.replicas, ranks.tp, ranks.stage, local.across, ranks.everyone, parted.experts, parted.beside
    )
    state = State(
        local.module,
        memory.chunks,
        trainer.optimizer,
        memory.exchange,
        trainer.versions,
        memory.pager,
        trainer.scheduler,
        trainer.loss_scale,
        trainer.given,
    )
    settings = {"seed": recipe.seed, "global_batch": recipe.global_batch, "precision": recipe.precision.name}
    return Session(ranks.plan, ranks.world, settings, members, standing(local), state, trainer.runner, closing)


def standing(local: Local) -> Standing:
    """Who this rank is for a checkpoint."""
    mine, parts = local.ranks.replicas, {"experts": local.parted.beside, "tied": local.ranks.tp}
    apart = {
        kind: Standing(local.layouts, group.rank, group.size, parts[kind].rank, parts[kind].size)
        for kind, group in local.apart.items()
    }
    silent = frozenset[str]()
    if local.pipeline is not None and not local.pipeline.is_last:
        silent = frozenset(f"buffer.{name}" for name in local.pipeline.split.common_buffers)
    tp = local.ranks.tp
    return Standing(local.layouts, mine.rank, mine.size, tp.rank, tp.size, apart, silent)


def callable_model(local: Local, memory: Memory, trainer: Trainer) -> nn.Module:
    """The model, to be called without gradients by all ranks that have a part of it."""
    if local.pipeline is None:
        return local.module
    return Whole(local.pipeline, local.ranks.replicas if lockstep(local, memory) else None, trainer.runner.flush)


def evaluate_on(
    local: Local, memory: Memory, recipe: Recipe, microbatch: int, dataset: Any, samples: int, measure: Loss | None
) -> Evaluation:
    """The mean of `measure`, by default of the loss, over the first `samples` of `dataset`."""
    return evaluate(
        local.module,
        measure or recipe.loss,
        dataset,
        samples,
        microbatch,
        recipe.collate,
        local.ranks.replicas,
        local.ranks.world.device,
        local.randomness,
        local.randomness.keyed,
        memory.gather,
        local.parted.context,
        lockstep(local, memory),
        local.pipeline,
        recipe.even,
    )


def objective_of(local: Local, memory: Memory, trainer: Trainer, recipe: Recipe, batch: Batch) -> Objective:
    """The loss of `batch` as a function of the parameters."""
    check_objective(local.pipeline)
    ranks, randomness = local.ranks, local.randomness
    drawn = randomness if randomness.keyed or local.parted.context is not None else None
    experts = local.parted.experts or ranks.replicas
    groups = {
        name: experts if layout.of_experts else ranks.stage if "tp" in layout.reduce else ranks.replicas
        for name, layout in local.layouts.items()
    }
    alike = lockstep(local, memory)
    return Objective(local.module, recipe.loss, trainer.runner, batch, drawn, ranks.replicas, groups, alike)


def loop_over(
    local: Local,
    memory: Memory,
    trainer: Trainer,
    microbatches: int,
    step_index: Callable[[], int],
    stepped: Callable[[], None],
) -> Loop:
    """A loop of the caller's, `microbatches` of it a step and rank."""
    check_loop(microbatches, memory.precision, local.pipeline, local.parted.context)
    ranks, runner, group = local.ranks, trainer.runner, local.ranks.replicas
    places = [group.ranks.index(rank) for rank in memory.exchange.partners.ranks]
    meets = lockstep(local, memory) or runner.whole
    joined = None if meets else partial(ranks.among, group, "join", range(group.size))
    module, randomness, gather = local.module, local.randomness, memory.gather
    return Loop(module, runner, randomness, gather, group, microbatches, step_index, stepped, places, joined)
