"""Numbers of ranks with which a job cannot go on: who would make them so many, and is not needed, waits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

SECONDS = 300.0
"""After so long they are tried again, since the plan may have been changed."""


@dataclass
class Unfit:
    """How many ranks the members of a generation had that could not go on, and until when that holds."""

    until: dict[tuple[int, ...], float] = field(default_factory=dict)

    def note(self, ranks: Collection[int], now: float) -> None:
        """Takes in that members with so many `ranks` could not go on."""
        self.until[_sizes(ranks)] = now + SECONDS

    def holds(self, ranks: Collection[int], now: float) -> bool:
        """Returns whether members with so many `ranks` could not."""
        return now < self.until.get(_sizes(ranks), now)

    def without(self, ranks: Mapping[str, int], stay: Collection[str], now: float) -> list[str]:
        """Returns the members that are to go on, of those with so many `ranks`: without the last ones that need not
        `stay`, as many as it takes. All of them where that does not help, or nobody needs to stay."""
        fit = list(ranks)
        while self.holds([ranks[name] for name in fit], now):
            others = [name for name in fit if name not in stay]
            if not others or len(others) == len(fit):
                return list(ranks)
            fit.remove(others[-1])
        return fit


def _sizes(ranks: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))
