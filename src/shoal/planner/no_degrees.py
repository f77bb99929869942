"""What is said where no degrees are legal: what stands against them, and which pins, rows or devices would do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from shoal.errors import UserError
from shoal.planner.choices import Choices, trains_apart
from shoal.planner.degrees import PINS, Spread
from shoal.planner.pieces import grouped
from shoal.planner.profile import NOT_ASKED
from shoal.planner.task import Task, spoken


def no_degrees(task: Task) -> str:
    """Why a search for `task` finds no degrees, and what would do."""
    with_pins = f" with {spoken(task.pins)}" if task.pins else ""
    return (
        f"no degrees fit {task.cluster.size} devices, {task.rows} rows a step and {len(task.profile.parts)} parts of "
        f"the model{with_pins}: {'; '.join(dict.fromkeys([*_whys(task), _remedy(task)]))}"
    )


def _whys(task: Task) -> Iterator[str]:
    given = {what: task.pins[field] for field, what in PINS.items() if task.pins.get(field, 1) != 1}
    factors = [what for what in given if what != "experts"]  # experts are spread over what these are
    if task.cluster.size % (ranks := prod(given[what] for what in factors)):
        names = [field for field, what in PINS.items() if what in factors]
        yield f"{' x '.join(names)} = {ranks} does not divide {task.cluster.size}"
    for what in given:
        way = "ring" if what == "tokens" and task.pins.get("context") == "ring" else what
        if (why := task.profile.refused.get(way, "")) not in ("", NOT_ASKED):
            yield why
    for what, number in (("tokens", "heads"), ("experts", "experts")):
        ranks = given.get(what, 1) * (given.get("parts", 1) if what == "tokens" else 1)
        way, has = "ring" if task.pins.get("context") == "ring" else what, task.legal.get(number, 1)
        if what in given and way != "ring" and has > 1 and has % ranks:
            yield f"{has} {number} do not come out even among {ranks} ranks"
    if given.get("stages", 1) > (most := len(grouped(task.profile.parts))):
        yield f"the model can be cut into {most} stages at most, one for each of its blocks"
    elif {"stages", "schedule"} & set(task.pins):
        yield "stages are plan.pp times the chunks of the schedule, each of a block at least"
    if trains_apart(task):
        yield "what trains apart are replicas, of which there are two at least"
    if given.get("copies", 1) > task.rows:
        yield f"each of {given['copies']} replicas has a row at least"


def _remedy(task: Task) -> str:
    """Each pin without which there are degrees, with those that it may be; else that more rows, or fewer pins, do."""
    free = []
    for field in task.pins:
        if task.pins[field] == 1 and task.legal.get(PINS.get(field, "")) == 1:
            continue  # it is so without a pin: replicas cannot keep the buffers, or it cannot be divided so
        if found := _spreads(replace(task, pins=_without(task.pins, field))):
            may = sorted({getattr(each, PINS[field]) for each in found}) if field in PINS else []
            free.append(f"leave out {field}" + (f" or take {field} = {' or '.join(map(str, may))}" if may else ""))
    if free:
        return "; or ".join(free)
    if task.rows < task.cluster.size and _spreads(replace(task, rows=task.cluster.size)):
        return f"take train.global_batch = {task.cluster.size}, or fewer devices"
    if task.pins and _spreads(replace(task, pins={})):
        return "leave out several of these"
    return "take another number of devices"


def _without(pins: Mapping[str, Any], field: str) -> dict[str, Any]:
    """The pins without one, and without stages that are cut where the number of stages is free."""
    gone = {field, "stages"} if PINS.get(field) == "stages" else {field}
    return {key: value for key, value in pins.items() if key not in gone}


def _spreads(task: Task) -> list[Spread]:
    try:
        return Choices(task).spreads()
    except UserError:  # of another pin
        return []
