"""What `plan.buddy` makes: who keeps the state that only one rank has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from shoal.assembly.memory import Memory
from shoal.assembly.model import Local
from shoal.assembly.recipe import Recipe
from shoal.assembly.role import role
from shoal.checkpoint.buddy import Buddy, Mine, steps_between
from shoal.chunks import Chunk
from shoal.errors import UserError
from shoal.optim.fused import ChunkwiseOptimizer
from shoal.optim.optimizer import ChunkOptimizer
from shoal.optim.tiers.in_turn import InTurn
from shoal.plan import option_name


def buddy(local: Local, memory: Memory, recipe: Recipe, optimizer: ChunkOptimizer) -> Buddy | None:
    """Makes the buddy of another rank of this one; None without `plan.buddy`, and for a rank alone. Raises UserError
    for an exchange of which each rank has state of its own."""
    ranks = local.ranks
    plan, world = ranks.plan, ranks.world
    if not plan.buddy or world.size == 1:
        return None
    if memory.exchange.state():
        raise UserError(
            f'plan.buddy does not go with plan.exchange = "{option_name(plan.exchange, "exchange")}", of which each '
            'rank has state of its own that no other keeps: take exchange = "allreduce", or leave buddy out'
        )

    def make(chunks: Sequence[Chunk], parameters: Mapping[str, nn.Parameter]) -> ChunkOptimizer:
        in_turn = InTurn() if isinstance(optimizer.torch, ChunkwiseOptimizer) else None
        return ChunkOptimizer(recipe.optimizer, chunks, parameters, local.whole.groups, recipe.clip_value, in_turn)

    every = steps_between(plan.buddy, recipe.optimizer, local.whole.groups.options, memory.precision)
    mine = Mine(local.module, memory.chunks, optimizer, role(local))
    return Buddy(ranks.own(world.everyone, "buddies"), world.host_id, every, mine, make, world.device)
