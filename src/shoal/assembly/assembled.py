"""What the phases of an assembly have given."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from shoal.assembly.memory import Memory
from shoal.assembly.model import Local
from shoal.assembly.recipe import Recipe
from shoal.assembly.trainer import Trainer
from shoal.chunks.adopt import let_go


@dataclass(frozen=True)
class Assembled:
    """A model that can be trained.

    recipe: how it is trained
    microbatch: samples a forward
    local: the model as this rank has it
    memory: its storage
    trainer: what makes steps
    """

    recipe: Recipe
    microbatch: int
    local: Local
    memory: Memory
    trainer: Trainer


def closing(assembled: Assembled) -> ExitStack:
    """What an engine ends when it is closed, whichever of it raises: steps first, then who speaks to other ranks, pages
    last."""
    local, memory, trainer = assembled.local, assembled.memory, assembled.trainer
    stack = ExitStack()
    stack.callback(local.ranks.leave)
    if memory.pager is not None:
        stack.callback(memory.pager.close)
    stack.callback(let_go, memory.parameters)
    for each in (trainer.optimizer, trainer.lane, memory.storage):
        stack.callback(each.close)
    for axis in local.axes:
        stack.callback(axis.close)
    stack.callback(memory.exchange.close)
    stack.callback(trainer.runner.close)
    stack.callback(memory.storage.leave)
    stack.callback(trainer.runner.settle)
    return stack


def take_apart(local: Local, memory: Memory) -> None:
    """Empties a module that nobody trains any more. Its hooks, stand-ins and replaced forwards lead back to it: all
    that it holds would stay until the next full collection of garbage, beside what has come in its place."""
    for module in list(local.module.modules()):
        module.__dict__.clear()
    if memory.pager is not None:
        memory.pager.pages.clear()
    if memory.offload is not None:
        memory.offload.tier.relieve = None
