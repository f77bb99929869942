"""What trains the model: optimizer, exchange of gradients, and the step that runs them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch.optim.lr_scheduler import LRScheduler

from shoal.assembly.buddy import buddy
from shoal.assembly.compatibility import check_gradients_by_name
from shoal.assembly.memory import Memory
from shoal.assembly.model import Local
from shoal.assembly.recipe import Recipe
from shoal.checkpoint.buddy import Buddy
from shoal.checkpoint.given import Given
from shoal.chunks import GradientPool
from shoal.chunks.allocate import Shared
from shoal.chunks.versions import Versions
from shoal.comm import Lane
from shoal.exchange import Replica
from shoal.exchange.hooks import UserHooks
from shoal.exchange.rows import row_by_row
from shoal.module.batchnorm import RunningStatistics
from shoal.module.buffers import OtherBuffers
from shoal.module.compiling import blocks, graphs
from shoal.optim.lr import Course, check_scheduler
from shoal.optim.optimizer import ChunkOptimizer
from shoal.pipeline import delay
from shoal.plan import option_name
from shoal.precision import LossScale
from shoal.training.clip import ClipSettings
from shoal.training.effects import Effects
from shoal.training.forward import Forward
from shoal.training.intact import Intact
from shoal.training.microbatches import Dealing, no_fixed_cut, partners_in
from shoal.training.no_flush import Delays, NoFlushRunner
from shoal.training.resident import Resident
from shoal.training.setup import StepGroups, Trained
from shoal.training.step import StepRunner


@dataclass(frozen=True)
class Trainer:
    """What makes a step.

    `given`: what the caller gave optimizer and scheduler, for checkpoints. `lane`: where gradients are exchanged.
    `gradient_pool`: the memory that gradients take in turn, None where each has its own.
    `versions`: the weights that microbatches under way still see, None where a schedule has a flush.
    `buddy`: keeps state of another rank, None without `plan.buddy`.
    """

    optimizer: ChunkOptimizer
    scheduler: LRScheduler | None
    given: Given
    lane: Lane
    gradient_pool: GradientPool | None
    loss_scale: LossScale | None
    versions: Versions | None
    buddy: Buddy | None
    runner: StepRunner | NoFlushRunner


def trainer(local: Local, memory: Memory, recipe: Recipe, microbatch: int) -> Trainer:
    """Makes optimizer and step over the chunks of `memory`. All ranks call it alike.

    Raises UserError for a schedule that cannot be called, and where gradients by name are asked for that ranks do not
    share.
    """
    world = local.ranks.world
    optimizer = _optimizer(local, memory, recipe)
    scheduler = recipe.schedule(optimizer.torch) if recipe.schedule else None
    check_scheduler(scheduler)
    course = Course(scheduler, optimizer.given) if scheduler else None
    given = Given(optimizer, course, recipe.settings())
    for chunk in memory.trainable:
        chunk.rest()
    lane = world.lane()
    gradient_pool = _attach(local, memory, optimizer, lane)
    check_gradients_by_name(local.ranks.plan, recipe.by_name, memory.exchange, local.flushes)
    scale = LossScale(memory.precision.scaling, world.device) if memory.precision.scaling else None
    versions = None if local.flushes else Versions(memory.trainable, memory.parameters, _late(local) + 1)
    keeps = buddy(local, memory, recipe, optimizer)
    hooks = UserHooks(memory.parameters, local.layouts, local.axes)
    trained = Trained(memory.parameters, hooks, memory.exchange, optimizer, scheduler, scale, keeps)
    runner = _runner(local, memory, recipe, microbatch, trained, versions)
    return Trainer(optimizer, scheduler, given, lane, gradient_pool, scale, versions, keeps, runner)


def lockstep(local: Local, memory: Memory) -> bool:
    """Whether all ranks run as many forwards, since weights or tokens come together in them."""
    return memory.gather is not None or any(axis.lockstep for axis in local.axes)


def _optimizer(local: Local, memory: Memory, recipe: Recipe) -> ChunkOptimizer:
    in_turn = None if memory.offload is None else memory.offload.in_turn(memory.pager)
    return ChunkOptimizer(
        recipe.optimizer, memory.trainable, memory.parameters, local.whole.groups, recipe.clip_value, in_turn
    )


def _attach(local: Local, memory: Memory, optimizer: ChunkOptimizer, lane: Lane) -> GradientPool | None:
    """Attaches the exchange to the chunks that it reduces; returns what lends them memory for gradients."""
    ranks, offload = local.ranks, memory.offload
    shared = Shared(ranks.replicas, ranks.world.device)
    gradient_pool = memory.maker.gradient_pool(memory.trainable, shared, None if offload is None else offload.tier)
    beside = next((ranks.own(axis.group, "gradients") for axis in local.axes if axis.sums_gradients), None)
    deciding = next((ranks.own(axis.group, "decisions") for axis in local.axes if axis.cuts_matrices), None)
    among = partial(ranks.among, ranks.replicas)
    memory.exchange.attach(
        Replica(memory.trainable, ranks.replicas, lane, optimizer, among, gradient_pool, beside, deciding)
    )
    return gradient_pool


def _late(local: Local) -> int:
    """By how many versions the weights are older than the newest where this rank updates them."""
    return delay(local.ranks.plan, local.ranks.stages.rank)


def _runner(
    local: Local,
    memory: Memory,
    recipe: Recipe,
    microbatch: int,
    trained: Trained,
    versions: Versions | None,
) -> StepRunner | NoFlushRunner:
    """Makes what runs steps of `microbatch` samples a forward."""
    ranks, pipeline, group, partners = local.ranks, local.pipeline, local.ranks.replicas, memory.exchange.partners
    forward = _forward(local, memory, recipe)
    streams = forward.streams
    of_group = (group.rank // streams, group.size // streams, partners_in(group, partners, streams))
    together, shares = lockstep(local, memory), tuple(ranks.plan.shares)
    dealing = Dealing(microbatch, recipe.even, recipe.sync_bn, *of_group, together, shares)
    clipping = ClipSettings(recipe.clip, recipe.keep_gradients, recipe.norms_every, local.layouts)
    if pipeline is None or versions is None:
        groups = StepGroups(group, partners, local.axes)
        return StepRunner(forward, dealing, groups, trained, clipping, pipeline)
    # a schedule without a flush votes beside the computation
    axes = [axis.beside(f"ballot{ranks.serial}") for axis in local.axes if axis.cuts_matrices or axis.cuts_layers]
    groups = StepGroups(group, partners, axes)
    return NoFlushRunner(forward, dealing, groups, trained, clipping, pipeline, _delays(local, versions))


def _forward(local: Local, memory: Memory, recipe: Recipe) -> Forward:
    """Makes what runs the forward of a microbatch, and sees what it changes."""
    module, parallelized, device = local.module, local.parallelized, local.ranks.world.device
    fixed, partners = no_fixed_cut(recipe.microbatch, recipe.sync_bn), memory.exchange.partners
    by_plan = bool(local.ranks.plan.compile)
    if module.training:  # as it was made: nobody has asked layers with a `train` of their own yet
        module.train()
    effects = Effects(
        module,
        RunningStatistics(module),
        OtherBuffers(module, partners.size, recipe.buffers == "averaged", fixed, graphs(module, by_plan)),
        parallelized.counts(),
        parallelized.losses_of_all_tokens,
        merges_statistics=not recipe.sync_bn,
    )
    rows = row_by_row(module, blocks(module) if by_plan else (), device)
    gather = memory.gather or Resident()
    ledger = local.ranks.world.ledger
    intact = _intact(local, memory)
    return Forward(module, recipe.loss, local.randomness, ledger, effects, local.axes, rows, gather, intact)


def _intact(local: Local, memory: Memory) -> Intact:
    """Makes what finds forwards that write to weights. Where replicas train apart each has its own."""
    if memory.exchange.trains_apart:
        return Intact()
    lost = ""
    if any(chunk.owned.masters is not None for chunk in memory.chunks):
        lost = "the masters of which weights are made do not hear of it"
    if local.ranks.plan.size > 1:
        lost = "ranks run other numbers of forwards than one process, and some share their weights"
    again = lost
    if local.recompute is not None:
        again = 'plan.recompute runs a part of each forward again, which writes twice (recompute = "none" does not)'
    return Intact(memory.chunks, memory.parameters, lost, again, counted=local.flushes)


def _delays(local: Local, versions: Versions) -> Delays:
    """How steps overlap, where the schedule has no flush."""
    ranks = local.ranks
    together = option_name(ranks.plan.schedule, "schedule") == "2bw"
    telling = [
        ranks.world.group(f"dp-results{ranks.serial}", ranks.replicas.ranks),
        ranks.group("stages", f"results{ranks.serial}"),
    ]
    shared = local.pipeline is not None and local.pipeline.tied
    sharing = [axis.beside(f"hosts{ranks.serial}") for axis in local.axes if axis.cuts_layers and shared]
    return Delays(versions, _late(local), together, telling, sharing)
