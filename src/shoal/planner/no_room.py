"""What is said where memory is short, and what would do."""

from __future__ import annotations

from shoal.errors import UserError
from shoal.planner.task import Task


class NoRoom(UserError):
    """No plan fits, or holds in a dry run, for want of memory. `said`: that, `remedy`: what to do."""

    def __init__(self, said: str, remedy: str) -> None:
        super().__init__(said, remedy)
        self.said, self.remedy = said, remedy

    def __str__(self) -> str:
        return f"{self.said}. {self.remedy}"


def more_room(task: Task, enough: str = "") -> str:
    """What gives a task room that has none, in a sentence. `enough`: the `--device` that would do, "" where none is
    known."""
    free = ", or free what is pinned" if task.pins else ""
    if enough:
        return f"Give --device {enough}, or take more devices, a smaller model or shorter rows{free}"
    return f"Take more devices, or ones with more memory, a smaller model or shorter rows{free}"
