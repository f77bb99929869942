"""Whether generations of ranks come further, and the job goes on after one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shoal.elastic.events import Ended, Finish
from shoal.errors import CheckpointError, LaunchError, TrainingError, UserError

_FATAL = (UserError.exit_code, TrainingError.exit_code, CheckpointError.exit_code)
"""Exit codes of failures that a new start would meet again."""


@dataclass
class Headway:
    """step: the last committed one of the last generation, -1 where that is not known; best: of all of them.
    fruitless: how many in a row have failed and come no further than those before."""

    step: int = -1
    best: int = -1
    fruitless: int = 0

    def conclude(self, ended: Collection[Ended], asked: int, most: int) -> Finish | None:
        """Takes in how the ranks of a generation have left it; returns the end of the job, None where it goes on.

        asked: the signal by which they were told to end for good, 0 if they were not. most: fruitless generations in a
        row with which it ends.
        """
        failed = [each for each in ended if each.outcome in ("failed", "killed")]
        if (fatal := next((each for each in failed if each.code in _FATAL), None)) is not None:
            return Finish(fatal.code, fatal.message)
        if ended and all(each.outcome == "finished" for each in ended):
            return Finish(0, "the training is complete")
        if asked:
            return Finish(128 + asked, "the job was told to end")
        self.step = max((each.step for each in ended if each.step >= 0), default=self.step)
        self.fruitless = self.fruitless + 1 if failed and self.step <= self.best else 0
        self.best = max(self.best, self.step)
        if self.fruitless < most:
            return None
        why = f"{self.fruitless} generations in a row failed without a further step. The last: {failed[0].message}"
        return Finish(failed[0].code or LaunchError.exit_code, why)


def nearer(known: Ended | None, event: Ended) -> Ended:
    """Returns what is nearer to why a generation ended: ranks that only lost others may be heard of before these."""
    return event if known is None or (known.outcome == "lost" and event.outcome != "lost") else known


def said(event: Ended) -> str:
    """Says whose ranks ended, and why."""
    return f"ranks of {event.name} ended: {event.message}"
