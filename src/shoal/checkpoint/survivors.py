"""What the ranks of a new world have left of a run, after others have failed: handed to all of them from memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shoal.checkpoint.buddy import Buddy
from shoal.checkpoint.given import as_json
from shoal.checkpoint.handover import Handover
from shoal.checkpoint.optimizer_state import optimizer_extra
from shoal.checkpoint.pieces import Piece
from shoal.checkpoint.role import WriterRole
from shoal.checkpoint.run import Progress, State, Steps
from shoal.checkpoint.state import pieces
from shoal.checkpoint.user_state import UserState
from shoal.comm import World
from shoal.errors import CheckpointError
from shoal.exchange import Holds
from shoal.plan import Plan

_REMEDY = "Go on from a checkpoint: make an engine on the new world, and engine.load(directory)"


@dataclass(frozen=True)
class Left:
    """What one rank holds between two steps.

    step: the one that comes next
    why_not: the reason why a run of this plan cannot go on from what ranks hold; "" if it can
    extra: JSON state, of the optimizer what this rank knows; nothing where an update was cut short
    pieces: all that it holds
    user: the caller's own
    began: whether that is what it was when the step began
    made: the result of the step before, where the caller has not got it yet; else None
    world, rank: the generation of its world until now, and its number there
    buddy: keeps another rank's state here; None without `plan.buddy`
    """

    step: int
    why_not: str
    extra: Mapping[str, Any]
    pieces: Sequence[Piece]
    user: Sequence[Piece]
    began: bool
    made: Any
    world: int
    rank: int
    buddy: Buddy | None


def why_not(plan: Plan, state: State, progress: Progress) -> str:
    """Returns why a run of this plan cannot go on from what ranks hold, whoever fails; "" if it can."""
    exchange, step = state.exchange, progress.step
    alike = exchange.holds(step) is Holds.SUM and not exchange.drifts(step) and not exchange.own_optimizers
    if state.versions is not None:
        return f"under plan.schedule = {plan.schedule!r} updates are always under way"
    if not alike or exchange.state():
        return f"under plan.exchange = {plan.exchange!r} each rank has state of its own"
    return "of an iterable dataset the batch under way cannot be had again" if progress.source is not None else ""


def what_is_left(
    plan: Plan,
    world: World,
    state: State,
    steps: Steps,
    progress: Progress,
    place: Callable[[], Mapping[str, Any]],
    role: WriterRole,
    user: UserState,
) -> Left:
    """Returns what this rank holds, without asking others, of which some are no more; a step under way is given up.

    world: the one that has lost ranks
    place: gives the position of the run and its settings
    role: of one that gives all that it holds
    user: the caller's own
    """
    step, me = progress.step, (world.generation, world.rank, state.buddy)
    reason = why_not(plan, state, progress)
    made, ahead = steps.unreported, steps.abandon()
    if ahead is None or reason:
        return Left(step, reason, {}, [], [], False, None, *me)
    step += ahead
    state.optimizer.settle()
    extra = {**place(), "step": step, "replicas": None, **optimizer_extra(state.optimizer, None)}
    held = pieces(state.module, state.chunks, state.optimizer, role)
    user.give_up(step)
    began = user.committed_at == step
    return Left(step, "", as_json(extra), held, user.pieces(step), began, made, *me)


@contextmanager
def survivors(world: World, left: Left | None) -> Iterator[Handover]:
    """Gives, inside the context, the state of the newest step that the ranks of `world` hold, as a source that all of
    them read.

    Each rank makes an update for itself once all have voted for it, so a failure may come when some have made it and
    others have not: then those that have not take it from the others, which hold the same. One of those gives the
    caller's own, if there is one of them that had begun the next step: to others something may have happened before.
    Where no caller has got the result of the step before, all of them are to get it now, and deal with it alike.

    left: what this rank holds; None for one that is new

    Collective over `world`. Raises CheckpointError, on all ranks alike, where what they hold is not enough, with what
    to do instead.
    """
    try:
        yield _newest(world, left)
    except CheckpointError as error:
        raise CheckpointError(f"what ranks hold is not enough to go on: {error}. {_REMEDY}") from error


def _newest(world: World, left: Left | None) -> Handover:
    mine = None
    if left is not None:
        mine = [left.world, left.rank, left.step, left.why_not, left.began, left.made, dict(left.extra)]
    told = {place: each for place, each in enumerate(world.everyone.all_gather_object(mine)) if each is not None}
    for _, _, _, reason, *_ in told.values():
        if reason:
            raise CheckpointError(reason)
    newest = max((step for _, _, step, *_, extra in told.values() if extra), default=None)
    if newest is None:
        raise CheckpointError("an update was cut short on each of them" if told else "all of them are new")
    holders = {place: each for place, each in told.items() if each[-1] and each[2] == newest}
    gives = min(holders, key=lambda place: (holders[place][5] is not None, not holders[place][4], place))
    last = max(generation for generation, *_ in told.values())
    whole = {rank for generation, rank, *_ in holders.values() if generation == last}
    offered, kept = _from_buddies(world, left if left is not None and left.world == last else None, newest, whole)
    found = list(kept)
    if left is not None and world.rank in holders:
        found += left.pieces
        found += left.user if world.rank == gives else []
    extras = [extra for *_, extra in holders.values()]
    source = Handover(world.everyone, found, _merged([*extras, *offered]), world.host_id, world.device)
    source.made = holders[gives][5]
    return source


def _from_buddies(
    world: World, left: Left | None, step: int, whole: Collection[int]
) -> tuple[list[Mapping[str, Any]], Sequence[Piece]]:
    """Returns what buddies have kept of ranks that are gone, or not at `step`: the JSON state of all of them, and the
    pieces that are kept here. Raises CheckpointError where a rank that had something alone and its buddy are gone.

    whole: the ranks that hold the step
    """
    buddy = None if left is None else left.buddy
    everyone = world.everyone.all_gather_object(None if buddy is None else buddy.known())
    told = [each for each in everyone if each is not None]
    if not told:
        return [], []
    offer = None if buddy is None else buddy.offer(step, whole, told)
    mine = None if offer is None else [offer.rank, as_json(offer.optimizer)]
    offers = [each for each in world.everyone.all_gather_object(mine) if each is not None]
    lacking = set(told[0].needed).difference(whole, (rank for rank, _ in offers))
    if lacking:
        rank = min(lacking)
        its, alive = told[0].buddies[rank], {each.rank for each in told}
        why = "and both are gone" if rank not in alive else f"which is gone, and rank {rank} does not hold step {step}"
        if its in alive:
            why = "not yet as a whole"
        raise CheckpointError(f"what only rank {rank} had was kept by its buddy, rank {its}, {why}")
    return [optimizer for _, optimizer in offers], [] if offer is None else offer.pieces


def _merged(extras: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the JSON state of all, to which ranks with other parts of the model bring what the optimizer has of
    those."""
    groups, plain = list[dict[str, Any]](), dict[str, Any]()
    for each in reversed(extras):  # what a rank holds itself counts more than what is made again
        groups += [group for group in each["groups"] if group not in groups]
        plain.update(each["optim"])
    return {**extras[0], "groups": groups, "optim": plain}
