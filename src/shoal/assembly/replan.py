"""Takes a run from one assembly to another, under another plan, without a file."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from torch import nn

from shoal.assembly.assembled import Assembled, closing
from shoal.assembly.model import Local
from shoal.assembly.session import session
from shoal.checkpoint.handover import Handover
from shoal.checkpoint.session import Session
from shoal.checkpoint.survivors import survivors
from shoal.comm import Group, World
from shoal.errors import CheckpointError, StorageError, TrainingError, UserError
from shoal.exchange.hooks import is_hooked
from shoal.module.ahead import Ahead

REFUSALS = (UserError, StorageError, CheckpointError)
"""What all ranks raise alike, so that the old plan can go on. Anything else is the failure of one rank."""
READY = (
    "another plan builds the model anew, and this engine was given a ready one: give Engine a factory, "
    "model=lambda: Net(...)"
)
Assemble = Callable[[nn.Module | Callable[[], nn.Module]], Assembled]


class Follower(Protocol):
    """Holds on to parts of an engine, and takes the new ones when its plan has changed.

    `check(new)` raises UserError, on all ranks alike, where it could not go on with them.
    """

    def check(self, new: Assembled) -> None: ...

    def follow(self) -> None: ...

    def __hash__(self) -> int: ...


def reassembled(
    source: Handover,
    old: Session | None,
    model: nn.Module | Callable[[], nn.Module],
    assemble: Assemble,
    followers: Iterable[Follower],
) -> tuple[Assembled, Session]:
    """Assembles anew, with the state of a run that its session `old` hands over as `source` (None where others do);
    returns the new assembly and its session.

    model: as the engine was given it
    assemble: makes the new assembly of a factory
    followers: are asked before the state is taken over

    Raises UserError where the plan is refused, or the model cannot be built anew, and StorageError where its disk
    cannot be used; the old assembly can then go on.
    """
    with ExitStack() as undo:
        try:
            new = assemble(model if old is None else _anew(model, old.state.module))
            ending = undo.enter_context(closing(new))
            for follower in followers:
                follower.check(new)
            fresh = session(new, ending, None if old is None else old.user)
            theirs = fresh.take_over(source, old)
            _freeze(new.local.module, old, new.local.ranks.everyone)
            if fresh.state.buddy is not None:
                fresh.state.buddy.snapshot(fresh.progress.step)
            fresh.put_back(theirs, source.name)  # now that no other rank is waited for
        except REFUSALS as error:
            source.refuse(str(error))
            raise
        undo.pop_all()
    return new, fresh


def _freeze(module: nn.Module, old: Session | None, everyone: Group) -> None:
    """Leaves parameters of `module` alone that the caller's loop had frozen since they were made, on any rank."""
    mine = set[str]()
    if old is not None:
        trained = {slot.name for chunk in old.state.chunks if chunk.trainable for slot in chunk.slots}
        mine = {name for name, each in old.state.module.named_parameters() if not each.requires_grad} & trained
    frozen = set[str]().union(*everyone.all_gather_object(mine))
    for name, each in module.named_parameters():
        if name in frozen:
            each.requires_grad_(False)


def started(assembled: Assembled) -> tuple[Assembled, Session]:
    """Returns an assembly, and the session of the run that it begins."""
    return assembled, session(assembled, closing(assembled))


def joined(world: World, model: nn.Module | Callable[[], nn.Module], assemble: Assemble) -> tuple[Assembled, Session]:
    """Assembles `model`, with the state of a run that other ranks of `world` have (see survivors)."""
    with everywhere_or_nowhere(world):
        check_hooks_of_users(None, world.everyone)
        with survivors(world, None) as source:
            return reassembled(source, None, model, assemble, ())


@contextmanager
def without_collections() -> Iterator[None]:
    """Pauses Python's collector of garbage inside the context.

    It would take objects that a change needs for a moment for such that stay, and look through all that torch has
    loaded: 0.2 s on a rank, in one change of six, while the others wait.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def everywhere_or_nowhere(*worlds: World) -> Iterator[None]:
    """Closes all groups of `worlds` on a rank that fails inside, because it has no memory left, say: others may be
    waiting for it, some of them under the new plan, and none may train on as if all had the same one."""
    try:
        yield
    except (*REFUSALS, TrainingError):  # the last of a step that had not been read yet
        raise
    except BaseException:
        for world in set(worlds):
            world.close()
        raise


def check_hooks_of_users(local: Local | None, everyone: Group) -> None:
    """Raises UserError, on all ranks of `everyone` alike, where parameters have hooks that no constructor has
    registered: the model that is built anew would not have them. `local`: None for a rank that has no model yet."""
    mine = list[str]()
    if local is not None:
        named, known = local.module.named_parameters(), local.whole.hooked
        mine = [name for name, each in named if is_hooked(each) and name not in known]
    if names := sorted({name for theirs in everyone.all_gather_object(mine) for name in theirs}):
        raise UserError(
            f"{names[0]} has a hook that was registered after the engine was made, and the model is built anew: remove "
            "the hook, and register it again on engine.module afterwards"
        )


def _anew(factory: nn.Module | Callable[[], nn.Module], trained: nn.Module) -> Callable[[], nn.Module]:
    """Returns `factory`, which refuses to give a module again that is in training, and one that is a module itself. It
    does so where it is called: there all ranks learn of it, also those that join."""
    if isinstance(factory, nn.Module):
        return _ready
    known = set(map(id, trained.modules()))

    def make() -> nn.Module:
        module = factory()
        if isinstance(module, nn.Module) and any(id(each) in known for each in module.modules()):
            raise UserError(
                "another plan builds the model anew, and the factory gave modules that are in training: it must make "
                "a model each time it is called"
            )
        return module

    return factory.handed_on(make, known) if isinstance(factory, Ahead) else make


def _ready() -> nn.Module:
    raise UserError(READY)
