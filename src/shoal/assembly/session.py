"""From the phases of an assembly to what saves and reads the state of its run."""

from __future__ import annotations

from contextlib import ExitStack

from shoal.assembly.assembled import Assembled
from shoal.assembly.role import role
from shoal.checkpoint.run import Members, State
from shoal.checkpoint.session import Session
from shoal.checkpoint.user_state import UserState


def session(assembled: Assembled, closing: ExitStack, user: UserState | None = None) -> Session:
    """What saves and reads the state of the run. `user`: the caller's own, of a run that goes on."""
    local, memory, trainer, recipe = assembled.local, assembled.memory, assembled.trainer, assembled.recipe
    ranks, parallelized = local.ranks, local.parallelized
    members = Members(
        ranks.replicas,
        ranks.parts,
        ranks.stage,
        local.across,
        ranks.everyone,
        parallelized.experts,
        parallelized.beside,
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
        trainer.buddy,
    )
    settings = {"seed": recipe.seed, "global_batch": recipe.global_batch, "precision": recipe.precision.name}
    user = UserState() if user is None else user
    trainer.runner.forward.effects.of_the_caller.append(user)
    return Session(ranks.plan, ranks.world, settings, members, role(local), state, trainer.runner, closing, user)
