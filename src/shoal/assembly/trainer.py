"""What trains the model: optimizer, exchange of gradients, and the step that runs them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shoal.assembly.compatibility import check_gradients_by_name, check_schedule
from shoal.assembly.memory import Memory
from shoal.assembly.model import Local
from shoal.assembly.recipe import Recipe
from shoal.checkpoint.given import Given
from shoal.chunks import Lender
from shoal.chunks.allocate import Shared
from shoal.chunks.versions import Versions
from shoal.comm import Group, Lane
from shoal.exchange import Replica
from shoal.exchange.hooks import UserHooks
from shoal.exchange.rows import row_by_row
from shoal.module.buffers import OtherBuffers
from shoal.module.compiling import blocks
from shoal.optim.lr import Course
from shoal.optim.optimizer import ChunkOptimizer
from shoal.optim.tiers.deferred_update import Later
from shoal.pipeline import delay
from shoal.plan import option_name
from shoal.precision import LossScale
from shoal.training.no_flush import Unflushed
from shoal.training.step import StepRunner, no_fixed_cut


@dataclass(frozen=True)
class Trainer:
    """What makes a step.

    `given`: what the caller gave optimizer and scheduler, for checkpoints. `lane`: where gradients are exchanged.
    `lender`: the memory that gradients take in turn, None where each has its own.
    `versions`: the weights that microbatches under way still see, None where a schedule has a flush.
    """

    optimizer: ChunkOptimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    given: Given
    lane: Lane
    lender: Lender | None
    loss_scale: LossScale | None
    versions: Versions | None
    runner: StepRunner


def trainer(local: Local, memory: Memory, recipe: Recipe, microbatch: int) -> Trainer:
    """Makes optimizer and step over the chunks of `memory`. All ranks call it alike.

    Raises UserError for a schedule that cannot be called, and where gradients by name are asked for that ranks do not
    share.
    """
    world = local.ranks.world
    optimizer = _optimizer(local, memory, recipe)
    scheduler = recipe.schedule(optimizer.torch) if recipe.schedule else None
    check_schedule(scheduler)
    given = Given(optimizer, Course(scheduler) if scheduler else None, recipe.settings())
    for chunk in memory.trainable:
        chunk.rest()
    lane = Lane(world.device, world.ledger)
    lender = _attach(local, memory, optimizer, lane)
    check_gradients_by_name(local.ranks.plan, recipe, memory.exchange, local.flushes)
    scale = LossScale(memory.precision.scaling, world.device) if memory.precision.scaling else None
    versions = None if local.flushes else Versions(memory.trainable, memory.parameters, _late(local) + 1)
    runner = _runner(local, memory, recipe, microbatch, optimizer, scheduler, scale, versions)
    return Trainer(optimizer, scheduler, given, lane, lender, scale, versions, runner)


def lockstep(local: Local, memory: Memory) -> bool:
    """Whether all ranks run as many forwards, since weights or tokens come together in them."""
    return memory.gather is not None or local.parted.experts is not None


def closing(local: Local, memory: Memory, trainer: Trainer) -> ExitStack:
    """What an engine ends when it is closed, whichever of it raises: steps first, then who speaks to other ranks, pages
    last."""
    stack = ExitStack()
    if memory.pager is not None:
        stack.callback(memory.pager.close)
    for each in (trainer.optimizer, trainer.lane, memory.storage, local.parted):
        stack.callback(each.close)
    if local.pipeline is not None:
        stack.callback(local.pipeline.close)
    stack.callback(memory.exchange.close)
    stack.callback(trainer.runner.close)
    stack.callback(memory.storage.leave)
    stack.callback(trainer.runner.settle)
    return stack


def _optimizer(local: Local, memory: Memory, recipe: Recipe) -> ChunkOptimizer:
    offload, pager = memory.offload, memory.pager
    deferred = offload is not None and offload.update == "deferred"
    return ChunkOptimizer(
        recipe.optimizer,
        memory.trainable,
        memory.parameters,
        local.whole.options,
        local.whole.member,
        recipe.clip_value,
        pager,
        offload is not None and offload.chunkwise,
        Later(local.ranks.world.ledger) if deferred else None,
        None if offload is None or pager is None else partial(offload.commit, pager=pager),
    )


def _attach(local: Local, memory: Memory, optimizer: ChunkOptimizer, lane: Lane) -> Lender | None:
    """Attaches the exchange to the chunks that it reduces; returns what lends them memory for gradients."""
    ranks, offload = local.ranks, memory.offload
    shared = Shared(ranks.replicas, ranks.world.device)
    lender = memory.maker.lender(memory.trainable, shared, None if offload is None else offload.tier)
    by_tokens = any("tp" in layout.reduce for layout in local.layouts.values())
    tokens = ranks.group("tp-gradients", "tp") if by_tokens else None
    deciding = ranks.group("tp-decisions", "tp") if ranks.tp.size > 1 else None
    among = partial(ranks.among, ranks.replicas)
    memory.exchange.attach(Replica(memory.trainable, ranks.replicas, lane, optimizer, among, lender, tokens, deciding))
    return lender


def _late(local: Local) -> int:
    """By how many versions the weights are older than the newest where this rank updates them."""
    assert local.pipeline is not None
    return delay(local.ranks.plan, local.pipeline.group.rank)


def _runner(
    local: Local,
    memory: Memory,
    recipe: Recipe,
    microbatch: int,
    optimizer: ChunkOptimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    scale: LossScale | None,
    versions: Versions | None,
) -> StepRunner:
    ranks, parted, plan = local.ranks, local.parted, local.ranks.plan
    beside, serial, tally, module = ranks.tp, ranks.serial, parted.tally(), local.module
    unflushed, fixed = not local.flushes, no_fixed_cut(recipe.microbatch, recipe.sync_bn)
    make = StepRunner if versions is None else partial(Unflushed, **_without_flush(local, versions))
    return make(
        module,
        recipe.loss,
        optimizer,
        scheduler,
        memory.parameters,
        memory.exchange,
        local.randomness,
        ranks.replicas,
        microbatch=microbatch,
        whole=recipe.sync_bn,
        even=recipe.even,
        clip=recipe.clip,
        keeps=recipe.keep_gradients,
        norms_every=recipe.norms_every,
        layouts=local.layouts,
        device=ranks.world.device,
        keyed=local.randomness.keyed,
        users=UserHooks(memory.parameters, local.layouts, plan),
        buffers=OtherBuffers(module, memory.exchange.partners.size, recipe.buffers == "averaged", fixed),
        passing=memory.gather,
        scale=scale,
        beside=beside if not unflushed else ranks.group(f"tp-ballot{serial}", "tp"),
        context=parted.context,
        tally=tally,
        alike=lockstep(local, memory),
        shares_routing=tally is not None and parted.losses_of_all_tokens,
        stages=local.pipeline,
        across=local.across if not unflushed else ranks.group(f"pp-ballot{serial}", "pp"),
        by_rows=row_by_row(module, blocks(module) if plan.compile else (), ranks.world.device),
    )


def _without_flush(local: Local, versions: Versions) -> dict[str, Any]:
    """What a runner of steps needs beside, where the schedule has no flush."""
    ranks = local.ranks
    together = option_name(ranks.plan.schedule, "schedule") == "2bw"
    telling: list[Group] = [
        ranks.world.group(f"dp-results{ranks.serial}", ranks.replicas.ranks),
        ranks.group(f"pp-results{ranks.serial}", "pp"),
    ]
    return {"versions": versions, "delay": _late(local), "together": together, "telling": telling}
