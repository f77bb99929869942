"""The batches of a run: from a dataset with an index in an order by seed and step, or from an iterable, dispatched by
one rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from shoal.assembly.arguments import check_dataset
from shoal.assembly.recipe import Recipe
from shoal.checkpoint.run import Progress
from shoal.comm import Group
from shoal.data import Batch, Cursor, IterableSource, map_batches
from shoal.data.loader import Order
from shoal.errors import UserError


def batches(
    dataset: Any,
    steps: int | None,
    epochs: int | None,
    cursor: Order | None,
    recipe: Recipe,
    everyone: Group,
    progress: Progress,
) -> Iterator[Batch]:
    """The global batches from the step of `progress` on (see Engine.batches)."""
    check_dataset(dataset, indexed=False)
    endless = _endless(dataset, epochs, cursor, recipe, everyone, progress)
    for batch in islice(endless, steps):  # never asks for one more: an iterable's place would move on
        if epochs is not None and batch.epoch >= epochs:
            return
        yield batch


def _endless(
    dataset: Any, epochs: int | None, cursor: Order | None, recipe: Recipe, everyone: Group, progress: Progress
) -> Iterator[Batch]:
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        cursor = cursor or Cursor(len(dataset), recipe.global_batch, recipe.seed)
        return map_batches(dataset, cursor, progress.step, recipe.collate)
    if cursor is not None:
        raise UserError("cursor= orders a map-style dataset; this one is an iterable, which comes as it comes")
    if not isinstance(progress.source, IterableSource) or progress.source.iterable is not dataset:
        source = IterableSource(dataset, reads=everyone.rank == 0)
        if isinstance(progress.source, dict):
            source.load_state_dict(progress.source)
        progress.source = source
    source = progress.source
    source.go_to(progress.step)

    def dispatch(samples: list[Any] | None) -> list[Any]:
        if progress.source is not source:
            raise UserError("the ranks have changed since these batches began: call engine.batches() again")
        return everyone.broadcast_object(samples)

    return source.batches(recipe.global_batch, dispatch=dispatch, epochs=epochs, collate=recipe.collate)
