"""What is pinned beside a search: its values are checked before anything is traced, as the engine would check them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shoal.chunks import budget
from shoal.errors import UserError
from shoal.exchange.named import algorithm
from shoal.module.compiling import compile_blocks
from shoal.module.recompute import Recompute
from shoal.parallel.tensor import check_kinds
from shoal.pipeline import check_cut, schedule_of
from shoal.plan import Plan, option_name
from shoal.planner.degrees import FIELDS
from shoal.planner.profile import Profile

PARTS = "parts"
MANY = 1 << 16
"""Blocks of a model that is not known yet: places of fewer can be meant."""


def check_pins(pins: Mapping[str, Any]) -> None:
    """Raises UserError for fields of a plan that there are not, and for values that no plan can have whatever the model
    is. What depends on the model (which blocks, layers or ways to divide it there are) a search says."""
    stages, copies = FIELDS["stages"], FIELDS["copies"]
    for field, value in pins.items():
        if field != "stages":  # which no plan has by itself
            Plan.from_dict({field: value})
        if value is not None and field in _CHECKS:
            _CHECKS[field](value)
    if "schedule" in pins:
        _check_schedule(Plan.from_dict({stages: pins.get(stages, 2), "schedule": pins["schedule"]}))
    if pins.get("stages"):
        _check_stages(pins["stages"])
        if stages not in pins:
            number = max(2, len(pins["stages"]))
            raise UserError(
                f"--pin stages={pins['stages']}: how many stages there are is given with it, by --pin {stages}={number}"
            )
    shares, shard = pins.get("shares") or (), pins.get("shard")
    if copies in pins or shard is not None:
        least = shard if type(shard) is int and shard > 0 else 1  # where it is not said how many there are
        number = pins.get(copies, len(shares) or least)
        Plan(**{copies: number}, zero=pins.get("zero", 3), shard=shard, shares=shares).check_groups()


def check_machine(pins: Mapping[str, Any], ranks: int) -> None:
    """Raises UserError for an exchange whose replicas train apart where there are too few `ranks` for two of them: it
    would be the same as none."""
    if "exchange" not in pins or pins.get(FIELDS["copies"]) == 1:
        return
    its = algorithm(pins["exchange"])
    each = getattr(its, "ranks", 1)
    if its.trains_apart and ranks <= each:
        them, fewer = ("replicas", "") if each == 1 else (f"islands of {each} ranks", " give fewer ranks,")
        raise UserError(
            f'plan.exchange = "{option_name(pins["exchange"], "exchange")}": what trains apart are {them}, of which '
            f"there are two at least, and the machine has {ranks}: leave out exchange,{fewer} or name a larger machine"
        )


def check_traced(pins: Mapping[str, Any], traced: Profile) -> None:
    """Raises UserError for placements that name no layer, or are of none of the ways in which it can be cut where it is
    pinned that layers are."""
    why = traced.refused[PARTS]
    if why.startswith("plan.placements[") or (why.startswith("plan.placements") and pins.get(FIELDS[PARTS], 1) > 1):
        raise UserError(why)


def _check_schedule(plan: Plan) -> None:
    if option_name(plan.schedule, "schedule") == "file":
        raise UserError(
            'plan.schedule = "file" says what each rank does, which leaves nothing to search for: give the whole plan '
            "instead of asking for one"
        )
    schedule_of(plan, 1)


def _check_stages(value: Any) -> None:
    if isinstance(value, str | Mapping):
        raise UserError(
            f'plan.stages = "{option_name(value, "stages")}": the planner cuts stages itself. Leave it out, or give '
            "numbers of blocks or names of parts"
        )
    check_cut(value)


def _check_compile(value: bool | str) -> None:
    if isinstance(value, str):
        compile_blocks(nn.Identity(), value)


_CHECKS: Mapping[str, Callable[[Any], object]] = {
    "recompute": lambda value: Recompute((), value, number=MANY),
    "exchange": algorithm,
    "memory": lambda value: budget(value, torch.device("cpu")),
    "placements": check_kinds,
    "compile": _check_compile,
}
"""What a value says by a name or a table is read as the engine reads it."""
