"""The versions of weights that microbatches see in a schedule without a flush, and how many of them a rank keeps
(PipeDream, SOSP'19, section 3.3).

Version n of a stage's weights is that after its n-th update. A forward takes the newest one there is, or with
`vertical_sync` the one that the microbatch has seen on the first stage; its backward takes the same again. A version is
kept while a forward that took it waits for its backward.
"""

from __future__ import annotations

from shoal.pipeline.actions import Action, Schedule


def versions(schedule: Schedule, vertical_sync: bool = False) -> dict[Action, int]:
    """Returns for each forward the version of the weights that it and its backward take."""
    newest = {action: version for order in schedule.orders for action, version in _newest(order).items()}
    if not vertical_sync:
        return newest
    return {action: newest[Action("F", 0, action.microbatch)] for action in newest}


def kept_versions(schedule: Schedule, vertical_sync: bool = False) -> list[int]:
    """Returns for each rank (of one stage) the most versions that it keeps at a time, the newest included.

    With `vertical_sync` they include those that a microbatch not yet arrived may ask for.
    """
    of, most = versions(schedule, vertical_sync), []
    for order in schedule.orders:
        updates, found, needed = 0, 1, {action: of[action] for action in order if action.kind == "F"}
        waiting: dict[Action, int] = {}
        for action in order:
            forward = Action("F", action.stage, action.microbatch)
            if action.kind == "F":
                waiting[action] = needed.pop(action)
            elif action.kind in ("B", "W"):
                del waiting[forward]
            elif action.kind == "U":
                updates += 1
            coming = {version for version in needed.values() if version <= updates}
            found = max(found, len({*waiting.values(), *coming, updates}))
        most.append(found)
    return most


def _newest(order: tuple[Action, ...]) -> dict[Action, int]:
    updates, found = 0, {}
    for action in order:
        if action.kind == "F":
            found[action] = updates
        updates += action.kind == "U"
    return found
