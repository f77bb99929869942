"""What a benchmark should reach: printed beside what it measured. A target is a line to read, never an assertion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console


@dataclass(frozen=True)
class Target:
    """Figure `key` of a run, which means `what` and is a ratio unless `unit` says otherwise, should be at least (or at
    most) `bound`."""

    key: str
    what: str
    bound: float
    at_least: bool = True
    unit: str = "x"

    def reached(self, figure: float) -> bool:
        return figure >= self.bound if self.at_least else figure <= self.bound


def judge(targets: Sequence[Target], figures: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """For the record: each target with what was `measured` (None if this run did not) and whether that `reached` it."""
    judged = []
    for target in targets:
        measured = figures.get(target.key)
        judged.append(
            {**asdict(target), "measured": measured, "reached": None if measured is None else target.reached(measured)}
        )
    return judged


def line(judged: Mapping[str, Any]) -> str:
    """One judged target as a line: "reached      7.2x, wanted at least 6x: shm all_reduce ..."."""
    verdict = {True: "reached", False: "not reached", None: "not measured"}[judged["reached"]]
    measured = "-" if judged["measured"] is None else f"{judged['measured']:.2f}{judged['unit']}"
    bound = f"at {'least' if judged['at_least'] else 'most'} {judged['bound']:g}{judged['unit']}"
    return f"{verdict:12}  {measured:>8}, wanted {bound:14}: {judged['what']}"


def print_targets(judged: Sequence[Mapping[str, Any]]) -> None:
    """Prints a line a target."""
    console = Console(width=160)
    for one in judged:
        console.print(line(one), highlight=False, markup=False)
