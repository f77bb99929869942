"""An engine's way from one assembly to another: under another plan, or with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TypeVar
from weakref import WeakSet

from torch import nn

from shoal.assembly.assembled import Assembled, take_apart
from shoal.assembly.rebuild import Rebuild
from shoal.assembly.replan import (
    READY,
    Assemble,
    Follower,
    check_hooks_of_users,
    everywhere_or_nowhere,
    reassembled,
    without_collections,
)
from shoal.checkpoint.handover import Handover
from shoal.checkpoint.session import Session
from shoal.comm import World
from shoal.errors import LaunchError
from shoal.native.heap import give_back_memory
from shoal.training.loop import Loop
from shoal.training.result import StepResult

Resized = Callable[[World, World], object]
"""Told of the old world and the new one."""
R = TypeVar("R", bound=Resized)


class Changing:
    """Holds what the phases of an assembly gave, and exchanges it for another while the run goes on."""

    def __init__(self, model: nn.Module | Callable[[], nn.Module], assembled: Assembled, session: Session) -> None:
        self._model = model
        self.followers: WeakSet[Follower] = WeakSet()  # who goes on with this engine under another plan
        self._resized = list[Resized]()
        self._go_on(assembled, session)

    def leave(self) -> None:
        """Hands over what this rank holds to those that go on without it, which call `replan`, and closes the engine.
        Raises CheckpointError if their plan is refused; the engine can then go on with all ranks."""
        with self._handed_over(self.world) as source:
            source.finish()
        self.close()

    def on_resize(self, callback: R) -> R:
        """Has `callback(old, new)` called after each `replan` and `regroup`, with the worlds before and after: to scale
        something with the number of ranks, say. Callbacks are called in the order in which they were given, on each
        rank that was there before: not on those that join, so they may not wait for other ranks. Returns it."""
        self._resized.append(callback)
        return callback

    def _between_steps(self) -> Session:
        """Returns the session, for what belongs between steps. Raises UserError in the middle of an accumulation of a
        loop of the caller's, whose gradients would be lost."""
        for loop in self._loops:
            loop.close_step()
        return self._session

    @contextmanager
    def _handed_over(self, world: World) -> Iterator[Handover]:
        """Gives the state of all ranks inside the context, to be read by those of `world`."""
        for loop in self._loops:
            loop.check_between_steps()
        with everywhere_or_nowhere(self.world, world), self._session.handed_over() as source:
            check_hooks_of_users(self._local, self._local.ranks.everyone)
            yield source

    @without_collections()
    def _replan(self, assemble: Assemble, world: World) -> None:
        with self._handed_over(world) as source:
            new = reassembled(source, self._session, self._model, assemble, self.followers)
        self._succeed(*new, closing=nullcontext())

    def give_up(self) -> None:
        """Has this rank wait for no other one any more, in collectives and in saves, where some of them have failed.
        Any thread may call it; what the rank is at then raises LaunchError, and `abandon` follows."""
        self.world.close()
        self._session.give_up_saves()

    def abandon(self) -> None:
        """Closes the groups of this rank, and gives up what it does together with others beside training, where some of
        them have failed. The state stays as it is, for `regroup`."""
        self.world.close()
        self._session.abandon_saves()

    @property
    def saving(self) -> bool:
        """Whether a save that was not waited for is still under way, as far as this rank knows."""
        return any(writer.under_way for writer in self._session.writers.values())

    @property
    def made(self) -> StepResult | None:
        """The result of the last step, where it was committed and no loop had got it when this engine went on by
        `regroup`, which returns it, or with `joins=True`; else None."""
        result: StepResult | None = self._session.progress.made
        return result

    def why_not_regroup(self) -> str:
        """Returns why other ranks could not go on from memory if some failed now, under whatever plan (see `regroup`);
        "" if they may."""
        return READY if isinstance(self._model, nn.Module) else self._session.why_not_left_behind()

    @without_collections()
    def _regroup(
        self, assemble: Callable[..., Assembled], world: World, microbatch: int | str | None
    ) -> StepResult | None:
        make: Assemble = partial(assemble, recipe=self._recipe.dealt(microbatch))
        self.world.close()  # who waits for a rank that lives waits no longer
        with everywhere_or_nowhere(world):
            check_hooks_of_users(self._local, world.everyone)
            with self._session.left_behind(world) as source:
                new = reassembled(source, self._session, self._model, make, self.followers)
        self._succeed(*new, closing=suppress(LaunchError))  # ranks cannot say goodbye to those that are no more
        return self.made

    def _succeed(self, new: Assembled, fresh: Session, closing: AbstractContextManager[object]) -> None:
        """Goes on with another assembly; `closing`: around what is closed of the old one."""
        for loop in self._loops:
            loop.ended = "the plan has changed since this loop was made: call engine.loop() again"
        left, old = (self._local, self._memory), self.world
        with closing:
            self.close()
        self._go_on(new, fresh)
        for follower in self.followers:
            follower.follow()
        take_apart(*left)
        give_back_memory()
        for callback in self._resized:
            callback(old, self.world)

    def _go_on(self, assembled: Assembled, session: Session) -> None:
        self._loops: WeakSet[Loop] = WeakSet()
        recipe, local, memory, trainer = assembled.recipe, assembled.local, assembled.memory, assembled.trainer
        self._recipe, self._local, self._memory, self._trainer = recipe, local, memory, trainer
        self._rebuild, self._session = Rebuild(local, memory, trainer), session
        self._begun = False
        self.plan, self.world = local.ranks.plan, local.ranks.world
        self.device, self.ledger = self.world.device, self.world.ledger
        self.seed, self.global_batch, self.microbatch = recipe.seed, recipe.global_batch, assembled.microbatch
        self.module, self.build_note, self.layouts = local.module, local.built.how, local.layouts
        self.precision, self.parameters = memory.precision, memory.parameters
        self.optimizer, self.scheduler, self.loss_scale = trainer.optimizer, trainer.scheduler, trainer.loss_scale

    def close(self) -> None:
        """Ends background work: waits for a save under way and for the lane."""
        self._session.closing.close()

    def _begin(self) -> None:
        """After a step: gives back the memory that the assembly and its first step have needed, and others do not."""
        if not self._begun:
            self._begun = True
            give_back_memory()
