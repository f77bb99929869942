"""What is said where no degrees are legal: what stands against them, and which pins, rows or devices would do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from shoal.errors import UserError
from shoal.planner.choices import Choices, can_share, island
from shoal.planner.degrees import PINS, Spread, divisors, why_not_tokens
from shoal.planner.pieces import grouped
from shoal.planner.profile import NOT_ASKED
from shoal.planner.task import Task
from shoal.toml import plan_text


class NoDegrees(UserError):
    """No degrees are legal."""


def no_degrees(task: Task) -> str:
    """Why a search for `task` finds no degrees, and what would do."""
    with_pins = f" with {plan_text(task.pins)}" if task.pins else ""
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
    yield from _of_tokens(task, given)
    if (has := task.legal.get("experts", 1)) > 1 and has % given.get("experts", 1):
        yield f"{has} experts do not come out even among {given['experts']} ranks"
    if given.get("stages", 1) > (most := len(grouped(task.profile.parts))):
        yield f"the model can be cut into {most} stages at most, one for each of its blocks"
    elif {"stages", "schedule"} & set(task.pins):
        yield "stages are plan.pp times the chunks of the schedule, each of a block at least"
    if (ranks := island(task)) > 0:
        them = "replicas" if ranks == 1 else f"islands of {ranks} replicas"
        yield f"what trains apart are {them}, of which there are two at least"
    if given.get("copies", 1) > task.rows:
        yield f"each of {given['copies']} replicas has a row at least"
    yield from _of_copies(task)


def _of_tokens(task: Task, given: Mapping[str, int]) -> Iterator[str]:
    """Why a row cannot be shared as it is pinned, in none of the ways that the model itself does not refuse."""
    ways = {False: "tokens", True: "ring"}
    if "context" in task.pins:
        ways = {ring: what for ring, what in ways.items() if ring == (task.pins["context"] == "ring")}
    if "tokens" in given:
        own = [Spread(tokens=given["tokens"], parts=given.get("parts", 1), ring=ring) for ring in ways]
        whys = [why_not_tokens(each, task.legal) for each in own if not task.profile.refused.get(ways[each.ring])]
        yield from whys if all(whys) else ()


def _of_copies(task: Task) -> Iterator[str]:
    """What of the pins goes with no number of replicas that there may be."""
    shard, shares = task.pins.get("shard"), task.pins.get("shares") or ()
    free = _spreads(replace(task, pins=_without(_without(task.pins, "shard"), "shares")))
    may = sorted({each.copies for each in free})
    said = f"dp may be {' or '.join(map(str, may))}"
    if shares and may and len(shares) not in may:
        yield f"plan.shares are {len(shares)} numbers, one for each of dp replicas, and {said}"
    if shard is None or not may:
        return
    if all(each % shard for each in may):
        yield f"plan.shard = {shard} of dp replicas share one copy of the state, and {said}"
    elif not any(can_share(each, shard) for each in free):
        yield f"plan.shard = {shard} ranks share one copy of the state, which ep has to divide or to be a multiple of"


def _remedy(task: Task) -> str:
    """Each pin without which there are degrees, with those that it may be; else that more rows, or fewer pins, do."""
    free = dict[frozenset[str], str]()
    for field in task.pins:
        if task.pins[field] == 1 and task.legal.get(PINS.get(field, "")) == 1:
            continue  # it is so without a pin: replicas cannot keep the buffers, or it cannot be divided so
        if found := _spreads(replace(task, pins=_without(task.pins, field))):
            gone = [each for each in task.pins if each not in _without(task.pins, field)]
            may = [] if len(gone) > 1 or _is_refused(task, field) else _values(field, found)
            take = f" or take {field} = {' or '.join(map(str, may))}" if may else ""
            free[frozenset(gone)] = f"leave out {' and '.join(gone)}{take}"
    if free:
        return "; or ".join(said for gone, said in free.items() if not any(fewer < gone for fewer in free))
    if task.rows < task.cluster.size and _spreads(replace(task, rows=task.cluster.size)):
        return f"take train.global_batch = {task.cluster.size}, or fewer devices"
    if task.pins and _spreads(replace(task, pins={})):
        return "leave out several of these"
    return "take another number of devices"


def _is_refused(task: Task, field: str) -> bool:
    """Whether the model refuses to be divided as a field says, of which other numbers were not traced."""
    return task.profile.refused.get(PINS.get(field, ""), "") not in ("", NOT_ASKED)


def _values(field: str, found: Iterable[Spread]) -> list[int]:
    """What a field may be in some of the degrees that were found; nothing for one that has no number."""
    if field == "shard":
        numbers = {number for each in found for number in divisors(each.copies) if can_share(each, number)}
        return sorted(numbers - {1})
    return sorted({getattr(each, PINS[field]) for each in found}) if field in PINS else []


def _without(pins: Mapping[str, Any], field: str) -> dict[str, Any]:
    """The pins without one, and without stages that are cut where the number of stages is free."""
    gone = {field, "stages"} if PINS.get(field) == "stages" else {field}
    return {key: value for key, value in pins.items() if key not in gone}


def _spreads(task: Task) -> list[Spread]:
    try:
        return Choices(task).spreads()
    except UserError:  # of another pin
        return []
