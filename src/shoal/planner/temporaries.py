"""What a microbatch makes beside what backward keeps, from the events of a dry run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import accumulate
from operator import sub
from typing import Generic, NamedTuple, TypeVar

from shoal.planner.recording import Event

Number = TypeVar("Number")


class Lives(NamedTuple, Generic[Number]):
    """Bytes of tensors without gradients of parameters, of one kind of number.

    - `above`: by how much the most of them is above the most that backward keeps; `beside`: the most while there is a
      gradient of a parameter
    - `passing`: the most that lives beside what backward keeps at that time
    """

    above: Number
    beside: Number
    passing: Number


def lives(events: Sequence[Event], sizes: Mapping[str, int], shared: Set[str]) -> Lives[int]:
    """What `events` make. `sizes`: bytes of parameters; `shared`: those that several parts have."""
    kept = [*accumulate(_bytes(events, "saved"))]
    keeps = max(kept, default=0)
    forward = kept.index(keeps) if kept else 0
    steps = _gradients(events, sizes, shared, forward)
    live = [*accumulate(map(sub, _bytes(events, "live"), steps))]
    while_any = (now for now, own in zip(live, accumulate(steps), strict=False) if own)
    return Lives(
        max(0, max(live, default=0) - keeps),
        max(0, max(while_any, default=0) - keeps),
        max(map(sub, live, kept), default=0),
    )


def _bytes(events: Sequence[Event], kind: str) -> list[int]:
    """How many bytes of a kind each event adds."""
    return [value if what == kind else 0 for what, value in events]  # type: ignore[misc]


def _gradients(events: Sequence[Event], sizes: Mapping[str, int], shared: Set[str], forward: int) -> list[int]:
    """How many bytes of gradients of parameters come or go at each event. A parameter's gradient is the last tensor of
    its size before it has come; of those that are `shared` each use has one behind the `forward`, and they are added
    up."""
    steps = [0] * (len(events) + 1)
    latest: dict[int, int] = {}
    for place, (what, value) in enumerate(events):
        if what == "live":
            latest[value] = place  # type: ignore[index]
        elif what == "came" and value in shared:
            size, left = sizes[value], 0  # type: ignore[index]
            for at in range(forward, place):
                if events[at] in (("live", size), ("live", -size)):
                    steps[at] += events[at][1]  # type: ignore[operator]
                    left += events[at][1]  # type: ignore[operator]
            steps[place + 1] -= left
        elif what == "came" and sizes[value] in latest:  # type: ignore[index]
            steps[latest[sizes[value]]] += sizes[value]  # type: ignore[index]
            steps[place + 1] -= sizes[value]  # type: ignore[index]
    return steps
