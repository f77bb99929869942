"""The batches of a run, and what happens between them: votes of replicas (`run.verify_every`), so that silent
corruption neither trains on nor is saved; and what `shoal chaos` wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shoal.data import Batch
from shoal.engine import Engine
from shoal.jobs.drill import drilled
from shoal.report import units


def batches(
    engine: Engine, data: Any, total: int | None, verify_every: int, say: Callable[[str], None]
) -> Iterator[Batch]:
    """Yields the batches of `data` from the engine's step on, up to `total` steps; see `voted`."""
    left = None if total is None else total - engine.step_index
    return drilled(engine, voted(engine, engine.batches(data, steps=left), verify_every, say))


def voted(engine: Engine, batches: Iterator[Batch], every: int, say: Callable[[str], None]) -> Iterator[Batch]:
    """Yields `batches`; before the first, and after each `every` steps, replicas compare what they hold.

    every: 0 for never. say: told once what has no replica. Raises what `engine.verify` raises.
    """
    told = False
    for batch in batches:
        if every and (batch.step % every == 0 or not told):
            vote = engine.verify()
            if vote.alone and not told:
                kinds = ", ".join(f"{units.size(size)} of {kind}" for kind, size in sorted(vote.alone.items()))
                say(f"run.verify_every: no other rank holds a copy of {kinds}, so these are not compared")
            told = True
        yield batch
