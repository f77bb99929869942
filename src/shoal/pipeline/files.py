"""Schedules in a file: one line per rank, with its actions in order.

# two ranks, three microbatches: kind, stage, microbatch
F0:0 F0:1 B0:0 F0:2 B0:1 B0:2
F1:0 B1:0 F1:1 B1:1 F1:2 B1:2
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, cast

from shoal.errors import UserError
from shoal.pipeline.actions import Action, Kind, Schedule, as_orders
from shoal.pipeline.check import check

_ACTION = re.compile(r"([FBIWU])([0-9]{1,6}):([0-9]{1,6})")


def read_schedule(
    path: Path, chunks: int = 1, placement: Literal["loop", "v"] = "loop", most: int | None = None
) -> Schedule:
    """Reads and checks a schedule.

    path: of the file
    chunks: stages per rank
    placement: assignment of stages to ranks, see actions
    most: of forwards whose activations a rank may keep at a time; None: any number

    Raises UserError with the file, the line and the fault.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the schedule {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    orders = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            orders.append([action_of(word, f"{path}, line {number}") for word in words])
    microbatches = 1 + max((action.microbatch for order in orders for action in order), default=-1)
    updates = any(action.kind == "U" for order in orders for action in order)
    schedule = Schedule(path.stem, len(orders), chunks, microbatches, as_orders(orders), placement, not updates)
    check(schedule, most)
    return schedule


def write_schedule(schedule: Schedule, path: Path) -> None:
    """Writes `schedule` in the form that `read_schedule` reads."""
    path.write_text("".join(" ".join(map(str, order)) + "\n" for order in schedule.orders))


def action_of(word: str, where: str = "a schedule") -> Action:
    """Returns the action written as `word`. Raises UserError, beginning with `where`, if it is none."""
    found = _ACTION.fullmatch(word)
    if found is None:
        raise UserError(
            f"{where}: {word!r:.60} is no action: write F, B, I, W or U, the stage, a colon and the microbatch, such "
            "as F0:3"
        )
    return Action(cast(Kind, found[1]), int(found[2]), int(found[3]))
