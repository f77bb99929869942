"""The fastest plan that a look at it confirms: candidates of a search, one after the other, and where all of one way to
divide the model are refused, those of a search without it; where memory is short, at last the one that needs least."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from shoal.errors import UserError
from shoal.planner.degrees import FIELDS
from shoal.planner.least import in_full, needing_least
from shoal.planner.no_room import NoRoom, more_room
from shoal.planner.search import search
from shoal.planner.task import EXACT, Estimate, Found, Task
from shoal.toml import plan_text

TRIES = 12
"""Candidates of one search that are looked at."""
OVER = "a dry run"
"""How a reason begins that speaks of memory, not of a plan that the engine refuses."""

Looked = TypeVar("Looked")
Look = Callable[[Task, Estimate], tuple[Looked, str]]
Passed = tuple[tuple[Estimate, str], ...]
_WAYS = ("experts", "tokens", "parts", "stages")
"""Ways to divide a model, those that are left out first where several are combined."""


@dataclass(frozen=True)
class Confirmed(Generic[Looked]):
    """The candidate that was confirmed, what the look at it gave, those that come after it, and those that were
    refused before it, each with the reason. `task`: as it was searched at last."""

    task: Task
    estimate: Estimate
    looked: Looked
    others: tuple[Estimate, ...]
    passed: Passed


def confirm(task: Task, found: Found, look: Look[Looked]) -> Confirmed[Looked]:
    """Looks at candidates of `found`, the fastest first, until one is legal and fits.

    `look` gives what it found and why that does not do ("" if it does), or raises UserError. Where all candidates are
    refused, the way to divide that they share stays out of another search. Raises UserError with the reasons, NoRoom
    where they are of memory.
    """
    passed: list[tuple[Estimate, str]] = []
    while True:
        left = list(found.best)
        new: list[tuple[Estimate, str]] = []
        while left and len(new) < TRIES:
            estimate = left.pop(0)
            try:
                looked, why = look(task, estimate)
            except UserError as error:
                why = str(error)
            if not why:
                return Confirmed(task, estimate, looked, tuple(left), (*passed, *new))
            new.append((estimate, why))
        passed += new
        narrower = _without(task, new)
        if narrower is None:
            return _last(task, passed, look)
        try:
            task, found = narrower, search(narrower)
        except UserError:  # nothing is left: what was refused says more
            return _last(task, passed, look)


def _last(task: Task, passed: list[tuple[Estimate, str]], look: Look[Looked]) -> Confirmed[Looked]:
    """Looks at what needs least of a device where candidates were refused for want of memory, which were the faster
    ones of those that estimates have fit. Raises UserError, or NoRoom, with the reasons for which all were refused."""
    if not any(why.startswith(OVER) for _, why in passed):
        raise UserError(_reasons(task, passed))
    task = replace(task, share=1.0)
    near = needing_least(task)
    estimate = None if near is None else in_full(task, near.choice)
    if estimate is not None and estimate.choice not in (each.choice for each, _ in passed):
        with suppress(UserError):
            looked, why = look(task, estimate)
            if not why:
                return Confirmed(task, estimate, looked, (), tuple(passed))
    raise NoRoom(_reasons(task, passed), more_room(task))


def _without(task: Task, passed: list[tuple[Estimate, str]]) -> Task | None:
    """The task with less memory by what dry runs counted beside; or without the exchanges that were refused and change
    what is computed, else without the ways to divide that were and are not pinned; None where nothing is left out."""
    refused = [each for each, why in passed if not why.startswith(OVER)]
    if not refused:
        return replace(task, share=0.85 * task.share)
    if lossy := {each.choice.exchange for each in refused} - {EXACT}:
        return replace(task, exchanges=tuple(each for each in task.exchanges if each not in lossy))
    legal, free = dict(task.legal), [what for what in _WAYS if FIELDS[what] not in task.pins]
    for each in refused:
        way = next((what for what in free if getattr(each.choice.spread, what) > 1), None)
        if way is not None:
            legal[way] = 1
    return replace(task, legal=legal) if legal != dict(task.legal) else None


def _reasons(task: Task, passed: list[tuple[Estimate, str]]) -> str:
    """What was refused: each reason once, with the first plan that it was given for."""
    first: dict[str, str] = {}
    for each, why in passed:
        first.setdefault(why, plan_text(each.choice.plan(task.pins).to_dict()))
    shown = list(first.items())[:3]
    return f"no plan that was tried holds in a dry run: {'; '.join(f'{plan}: {why}' for why, plan in shown)}"
