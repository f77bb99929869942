"""The faults that a run can have, and when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shoal.errors import UserError, check_choice, check_names, fits
from shoal.toml import read_toml

KINDS = {
    "kill": "a rank is killed (SIGKILL)",
    "stop": "a rank is stopped (SIGSTOP)",
    "drain": "a node is told to leave (SIGTERM at its supervisor)",
    "node": "a node is lost (SIGKILL of its supervisor)",
    "coordinator": "the supervisor that coordinates is killed",
    "drop": "all connections of a rank are shut",
    "hangup": "all connections of a supervisor are shut",
    "slow": "a rank gets a tenth of its time",
    "disk": "a rank's disk is full: it can write only small files",
    "save": "a rank is killed while a checkpoint is written",
    "rejoin": "a rank is killed while a node joins",
    "weight": "a bit of a weight flips on one rank",
    "optimizer": "a bit of the optimizer's state flips on one rank",
    "gradient": "a bit of the reduced gradient flips on one rank",
    "two": "ranks of two nodes are killed at once",
}
"""Each fault, in words."""
FLIPS = ("weight", "optimizer", "gradient")
"""Faults that only a vote of replicas finds."""
LASTING = {"slow": 20.0, "disk": 5.0}
"""Faults that end by themselves, and the seconds for which they last."""


@dataclass(frozen=True)
class Fault:
    """A fault of the kind `kind`, once `step` steps are committed.

    node, rank: whom it meets, by their places in this run: which node, in the order in which they came, and which rank
        of that node; None for any.
    seconds: how long it lasts, where it does; a schedule that does not say has those of LASTING.
    """

    kind: str
    step: int
    node: int | None = None
    rank: int | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        check_choice(f'kind = "{self.kind}": there is no such fault. There are', self.kind, KINDS)
        for name in ("step", "node", "rank", "seconds"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise UserError(f"{name} = {value} of a fault: give 0 or more")


@dataclass(frozen=True)
class Schedule:
    """The faults of a run in the order of their steps. `seed`: of whatever is left open, such as whom they meet."""

    faults: tuple[Fault, ...]
    seed: int


def drawn(kinds: Sequence[str], steps: int, seed: int) -> Schedule:
    """Returns a schedule with these kinds in an order of its own, spread over a run of `steps` steps.

    Raises UserError for an unknown kind, and where there are fewer steps than faults.
    """
    check_names("--faults: unknown fault", kinds, KINDS, "There are")
    if steps <= 2 * len(kinds):
        raise UserError(f"{len(kinds)} faults in {steps} steps: give a job of more steps, or fewer --faults")
    chosen = random.Random(seed)
    order, each = list(kinds), steps / (len(kinds) + 1)
    chosen.shuffle(order)
    places = [each * (place + 1 + chosen.uniform(-0.25, 0.25)) for place in range(len(order))]
    faults = (
        Fault(kind, int(place), seconds=LASTING.get(kind, 0.0)) for kind, place in zip(order, places, strict=True)
    )
    return Schedule(tuple(faults), seed)


def read_schedule(path: Path) -> Schedule:
    """Reads a schedule from TOML: `seed`, and a table [[fault]] for each. Raises UserError."""
    content = read_toml(path, "schedule")
    check_names(f"{path}: unknown key", content, ("seed", "fault"))
    tables, seed = content.get("fault", []), content.get("seed", 0)
    if not isinstance(seed, int) or not isinstance(tables, list) or not tables:
        raise UserError(f"{path}: give a whole number as seed, and a table [[fault]] for each fault")
    return Schedule(tuple(sorted((_fault(table, path) for table in tables), key=lambda fault: fault.step)), seed)


def _fault(table: Any, path: Path) -> Fault:
    hints = {"kind": str, "step": int, "node": int, "rank": int, "seconds": float}
    if not isinstance(table, dict) or not {"kind", "step"} <= table.keys():
        raise UserError(f"{path}: a fault has a kind and a step: {table}")
    check_names(f"{path}: unknown key of a fault", table, [each.name for each in fields(Fault)])
    for name, value in table.items():
        if not fits(value, hints[name]):
            raise UserError(f"{path}: {name} = {value!r} of a fault: expected {hints[name].__name__}")
    return Fault(**{"seconds": LASTING.get(table["kind"], 0.0), **table})
