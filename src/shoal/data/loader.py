"""Global batches of a map-style dataset: the ids of a step, and a function that loads any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from ..errors import UserError

Collate = Callable[[list[Any]], dict[str, Tensor]]


class MapDataset(Protocol):
    """A map-style dataset: any rank may read any item, and an item is the same each time."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Order(Protocol):
    """The samples of each step's global batch, a pure function of the step: `Cursor`, `BalancedCursor`."""

    def epoch(self, step: int) -> int: ...
    def ids(self, step: int) -> NDArray[np.int64]: ...


@dataclass(frozen=True)
class Batch:
    """The global batch of one step, the same on every rank. `load(some_of_ids)` returns those samples, stacked."""

    step: int
    epoch: int
    ids: tuple[int, ...]
    load: Callable[[Sequence[int]], dict[str, Tensor]]

    def __repr__(self) -> str:
        return f"Batch(step={self.step}, epoch={self.epoch}, {len(self.ids)} samples)"


def map_batches(
    dataset: MapDataset, cursor: Order, start_step: int = 0, collate: Collate | None = None
) -> Iterator[Batch]:
    """Yields the batches of `cursor` from `start_step` on, without end; nothing is read before a batch's `load`."""

    def load(ids: Sequence[int]) -> dict[str, Tensor]:
        return stacked([dataset[int(i)] for i in ids], collate)

    for step in count(start_step):
        yield Batch(step, cursor.epoch(step), tuple(cursor.ids(step).tolist()), load)


def stacked(samples: list[Any], collate: Collate | None) -> dict[str, Tensor]:
    """Makes a batch of samples by `collate`, or by `stack_samples`. Raises UserError for no dict of tensors."""
    if collate is None:
        return stack_samples(samples)
    batch = collate(samples)
    if not isinstance(batch, Mapping):
        raise UserError(
            f'collate gave a {type(batch).__name__}: give a dict of tensors by name, such as {{"x": x, "labels": y}}'
        )
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise UserError(
                f"collate gave a {type(value).__name__} for {key!r}: give tensors, each under a key of its own, and "
                "leave out what is none"
            )
    return batch


def stack_samples(samples: list[Any]) -> dict[str, Tensor]:
    """Stacks samples (dicts of tensors, arrays or numbers) along a new first dimension, key by key.

    Raises `UserError` with the key where samples have different keys or shapes, or values that are not numbers.
    """
    first = samples[0]
    if not isinstance(first, Mapping):
        raise UserError(
            f"a sample is a {type(first).__name__}, not a dict of tensors: return dicts from the dataset, or give "
            "collate="
        )
    for sample in samples:
        if sample.keys() != first.keys():
            raise UserError(f"samples of one batch have different keys: {sorted(first)} and {sorted(sample)}")
    return {key: _stack(key, [sample[key] for sample in samples]) for key in first}


def _stack(key: str, values: list[Any]) -> Tensor:
    for value in values:
        if not isinstance(value, Tensor | np.ndarray | np.number | np.bool_ | int | float):
            raise UserError(
                f"sample[{key!r}] is a {type(value).__name__}: give tensors, arrays or numbers, or give collate="
            )
    shapes = list(dict.fromkeys(tuple(np.shape(value)) for value in values))
    if len(shapes) > 1:
        images = max(map(len, shapes)) > 2
        remedy = "Resize images to one size (data.size of a job)" if images else "Pad samples to one length, pack them"
        raise UserError(
            f"sample[{key!r}] has different shapes in one batch: {', '.join(map(str, shapes))}. {remedy}, or give "
            "collate="
        )
    stacked = default_collate(values)
    assert isinstance(stacked, torch.Tensor)
    return stacked
