"""Checks that a schedule can run (complete, in an order that its dependencies allow, without deadlock), and computes
how many activations it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from shoal.errors import UserError
from shoal.pipeline.actions import Action, Schedule


def check(schedule: Schedule, most: int | None = None) -> None:
    """Raises UserError, naming rank and action, for a schedule that cannot run.

    It cannot if an action is missing, given twice, on a wrong rank, or never gets its turn. `most`: of forwards whose
    activations a rank may keep at a time; None: any number.
    """
    if len(schedule.orders) != schedule.ranks:
        raise UserError(f"schedule {schedule.name}: it has {len(schedule.orders)} orders for {schedule.ranks} ranks")
    for rank, order in enumerate(schedule.orders):
        _check_rank(schedule, rank, order)
    _run_through(schedule)
    if most is not None:
        _check_kept(schedule, most)


def _check_rank(schedule: Schedule, rank: int, order: tuple[Action, ...]) -> None:
    where, own = f"schedule {schedule.name}, rank {rank}", set(schedule.stages_of(rank))
    counts = Counter(order)
    for action, times in counts.items():
        if action.stage not in own:
            raise UserError(
                f"{where}: {action} is of a stage that rank {schedule.rank_of(action.stage)} has; this one has "
                f"{sorted(own)}"
            )
        if not 0 <= action.microbatch < schedule.microbatches:
            raise UserError(f"{where}: {action}, and the microbatches are 0 to {schedule.microbatches - 1}")
        if times > 1:
            raise UserError(f"{where}: {action} comes {times} times")
    for stage in sorted(own):
        for microbatch in range(schedule.microbatches):
            whole, half, rest = (counts[Action(kind, stage, microbatch)] for kind in ("B", "I", "W"))
            if not counts[Action("F", stage, microbatch)]:
                raise UserError(f"{where}: F{stage}:{microbatch} is missing")
            if not (whole and not half and not rest) and not (half and rest and not whole):
                raise UserError(
                    f"{where}: of the backward of stage {stage}, microbatch {microbatch}, give B, or I and W"
                )


def _run_through(schedule: Schedule) -> None:
    """Runs the ranks' orders as far as dependencies allow, until all are done or none can move. Raises UserError for
    the latter."""
    done: set[Action] = set()
    places = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            while places[rank] < len(order) and all(need in done for need in schedule.needs(order[places[rank]])):
                done.add(order[places[rank]])
                places[rank] += 1
                moved = True
    waiting = [
        f"rank {rank} at {order[place]} for "
        f"{', '.join(str(need) for need in schedule.needs(order[place]) if need not in done)}"
        for rank, (order, place) in enumerate(zip(schedule.orders, places, strict=True))
        if place < len(order)
    ]
    if waiting:
        raise UserError(f"schedule {schedule.name} comes to a halt: {'; '.join(waiting)}")


def _check_kept(schedule: Schedule, most: int) -> None:
    for rank, order in enumerate(schedule.orders):
        for action, now in zip(order, kept(order), strict=True):
            if (number := sum(now.values())) > most:
                raise UserError(
                    f"schedule {schedule.name}, rank {rank}: at {action} it keeps the activations of {number} "
                    f"forwards, and {most} are allowed (activations)"
                )


def kept(order: Sequence[Action]) -> Iterator[Mapping[int, int]]:
    """Yields, after each action, the number of microbatches of each stage whose activations the rank keeps.

    Activations are kept from F until B or W. Each time it is the same mapping, updated.
    """
    now: Counter[int] = Counter()
    for action in order:
        now[action.stage] += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        yield now


def live_activations(schedule: Schedule) -> list[int]:
    """Returns for each rank the most forwards (of a stage and a microbatch) whose activations it keeps at a time."""
    return [max((sum(now.values()) for now in kept(order)), default=0) for order in schedule.orders]
