"""The batches of a run, and what happens between them: votes of replicas (`run.verify_every`), so that silent
corruption neither trains on nor is saved; and what `shoal chaos` wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shoal import units
from shoal.data import Batch
from shoal.engine import Engine
from shoal.jobs.drill import drilled
from shoal.plan import Plan


class Votes:
    """Votes of replicas on what they hold between two steps of `engine`; what was voted on is not voted on again.

    every: steps from one vote to the next; 0 for none at all. say: told once what has no replica.
    """

    def __init__(self, engine: Engine, every: int, say: Callable[[str], None]) -> None:
        self._engine, self._every, self._say = engine, every, say
        self._last: tuple[int, Plan] | None = None

    def take(self) -> None:
        """Has replicas compare what they hold. Raises what `engine.verify` raises."""
        now = self._engine.step_index, self._engine.plan
        if not self._every or self._last == now:
            return
        vote = self._engine.verify()
        if vote.alone and self._last is None:
            kinds = ", ".join(f"{units.size(size)} of {kind}" for kind, size in sorted(vote.alone.items()))
            self._say(f"run.verify_every: no other rank holds a copy of {kinds}, so these are not compared")
        self._last = now

    def between(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yields `batches`, with votes before the first and after each `every` steps."""
        for batch in batches:
            if self._last is None or (self._every and batch.step % self._every == 0):
                self.take()
            yield batch


def batches(engine: Engine, data: Any, total: int | None, votes: Votes) -> Iterator[Batch]:
    """Yields the batches of `data` from the engine's step on, up to `total` steps, with `votes` between them."""
    left = None if total is None else total - engine.step_index
    return drilled(engine, votes.between(engine.batches(data, steps=left)))
