"""The ways to treat a block of a choice: whether backward finds what it keeps, or computes some of it again, or all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.module.chosen_blocks import chosen_blocks
from shoal.plan import option_name, option_parameters
from shoal.planner.sizes import POLICIES
from shoal.planner.task import Choice, Task

_SEVERAL = {"blocks": POLICIES, "budget": ("none", "full")}
"""The ways in which one plan treats blocks, where these are several."""
GIVEN: dict[str, Any] = {"which": (), "every": 0, "full": (), "selective": ()}
"""What `plan.recompute = {name = "blocks"}` may give, and what it is where it does not."""


def by_place(parameters: Mapping[str, Any], number: int) -> dict[int, str]:
    """How blocks of `number` are treated that a `recompute` of blocks with these parameters names, by their places."""
    full, some = chosen_blocks(number, *(parameters.get(key, default) for key, default in GIVEN.items()))
    return {**dict.fromkeys(full, "full"), **dict.fromkeys(some, "selective")}


def all_run_again(task: Task) -> bool:
    """Whether backward computes each block again, of which it keeps some results at most."""
    given = task.pins.get("recompute", "none")
    if (name := option_name(given, "recompute")) == "blocks":
        number = task.profile.blocks
        return len(by_place(option_parameters(given), number)) == number
    return name != "none"


def policies_of(task: Task, selective: bool = True) -> tuple[str, ...]:
    """The ways to treat a block that are tried, or that the plan's `recompute` has, the one that keeps most first.
    `selective`: whether results of operations can be kept."""
    given = task.pins.get("recompute")
    if given is None:
        return tuple(each for each in POLICIES if each in task.recompute and (selective or each != "selective"))
    name = option_name(given, "recompute")
    return _SEVERAL.get(name, (name,))


def keeps_operations(task: Task, choice: Choice) -> bool:
    """Whether the blocks of a choice can keep what some operations give: compiled ones only as one graph, which calls
    between ranks break, and in a stage what transformers hangs on its layers."""
    spread = choice.spread
    cut = spread.parts * spread.tokens * spread.experts * spread.stages > 1
    return not is_compiled(task, choice) or (task.selective and not cut)


def is_compiled(task: Task, choice: Choice) -> bool:
    """Whether the plan of a choice compiles blocks, with any backend."""
    return bool(task.pins.get("compile", choice.compile))
