"""What `plan.buddy` makes: who keeps the state that only one rank has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shoal.assembly.memory import Memory
from shoal.assembly.model import Local
from shoal.assembly.recipe import Recipe
from shoal.assembly.role import role
from shoal.checkpoint.buddy import Buddy, Mine
from shoal.chunks import Chunk
from shoal.errors import UserError
from shoal.exchange.named import algorithm
from shoal.optim.buddy import steps_between
from shoal.optim.fused import ChunkwiseOptimizer
from shoal.optim.groups import small_optimizer
from shoal.optim.optimizer import ChunkOptimizer
from shoal.optim.tiers.in_turn import InTurn
from shoal.plan import option_name


def buddy(local: Local, memory: Memory, recipe: Recipe, optimizer: ChunkOptimizer) -> Buddy | None:
    """Makes what keeps the state of another rank on this one; None without `plan.buddy`, and for a rank alone. All
    ranks call it alike. Raises UserError for an update that cannot be made again elsewhere."""
    plan, world, groups = local.ranks.plan, local.ranks.world, local.whole.groups
    if not plan.buddy or world.size == 1:
        return None
    _check(local, memory, recipe)

    def make(chunks: Sequence[Chunk], parameters: Mapping[str, nn.Parameter]) -> ChunkOptimizer:
        in_turn = InTurn() if isinstance(optimizer.torch, ChunkwiseOptimizer) else None
        return ChunkOptimizer(recipe.optimizer, chunks, parameters, groups, recipe.clip_value, in_turn)

    every = steps_between(plan.buddy, recipe.optimizer, groups.options, memory.precision)
    mine = Mine(local.module, memory.chunks, optimizer, role(local))
    return Buddy(local.ranks.own(world.everyone, "buddies"), world.host_id, every, mine, make, world.device)


def _check(local: Local, memory: Memory, recipe: Recipe) -> None:
    """Raises UserError for the first reason why a buddy could not make an update again, with what to do instead."""
    plan = local.ranks.plan
    its = algorithm(plan.exchange)
    apart = its.holds_otherwise or its.trains_apart or its.updates_itself or its.own_optimizers
    balances = plan.pipelined and plan.replicas == 1 and local.parallelized.moves_biases
    reasons = {
        f'plan.schedule = "{option_name(plan.schedule, "schedule")}", under which updates are always under way: take '
        "one with a flush, such as 1f1b": not local.flushes,
        f'plan.exchange = "{option_name(plan.exchange, "exchange")}", of which each rank has a state or an update of '
        'its own: take exchange = "allreduce"': apart or bool(memory.exchange.state()),
        "clip by a function, which changes gradients after they have gone to a buddy: give a number": callable(
            recipe.clip
        ),
        "SparseAdam, which asks for the rows of a gradient: take Adam": isinstance(
            small_optimizer(recipe.optimizer, local.whole.groups.options), torch.optim.SparseAdam
        ),
        "routers with balance_rate on a stage that one rank has, whose biases move after the vote for a step: take a "
        "balance loss": any(local.ranks.everyone.all_gather_object(balances)),
    }
    if (why := next((why for why, so in reasons.items() if so), None)) is not None:
        raise UserError(f"plan.buddy does not go with {why}, or leave buddy out")
