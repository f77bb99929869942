"""What each rank of a pipeline does when its last backward has ended."""

from __future__ import annotations

from dataclasses import replace

from shoal.planner.estimates import Beside
from shoal.planner.search import Search
from shoal.planner.task import Estimate, Task


def ends(task: Task, estimate: Estimate) -> list[Beside]:
    """What each rank does of a plan that was found for `task`; a rank alone, without stages."""
    choice = estimate.choice
    search = Search(replace(task, pins={**task.pins, "recompute": choice.recompute}))
    begun = search.looked(choice._replace(recompute="none"))
    return [search.beside(begun, rank) for rank in range(choice.spread.stages)]
