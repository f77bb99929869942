"""Residuals of error feedback, in the unit of the mean gradient that the engine applies, as of the last update made.

With K the sum of what all replicas keep and g the mean gradient of a step, each step that updates has

    applied + K after it = g + K before it

so over any steps, whatever their counts, what was applied and what is kept add up to the mean gradients. An algorithm
adds K to a step's sums, which are divided by the expected count; the exact count is known only after all have been
sent. With m = expected / count it has then applied m (sums + K - R), where R is what it kept of the sums, so

    K after it = K + m (R - K)

A step whose update is left out (fp16 overflow, not finite, nothing counted) leaves K alone. Clipping comes after: what
it takes away is not kept.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.chunks import Chunk
from shoal.device import is_accelerator, record_use
from shoal.exchange.algorithm import State
from shoal.plan import Plan


class Kept:
    """Tensors that wait for later steps.

    - `flats`: flat tensors, renewed in place
    - `parts`: for each of them, the slices of the parameters by name

    A step takes some and renews them in place; `commit` makes that permanent, `drop` restores what they were.
    """

    def __init__(self, flats: Sequence[Tensor], parts: Sequence[Mapping[str, slice]]) -> None:
        self._flats, self._parts = flats, parts
        self._before: dict[int, Tensor] = {}
        self._taken: set[int] = set()

    def take(self, index: int) -> Tensor:
        """Returns the tensor at `index`, to be renewed in place, as often as a step likes."""
        flat = self._flats[index]
        if index not in self._taken:
            self._before.setdefault(index, torch.empty_like(flat)).copy_(flat)
            self._taken.add(index)
        return flat

    @torch.no_grad()
    def commit(self, to_mean: Tensor | None, skip: Tensor | None, untouched: Collection[str]) -> None:
        """Makes the renewal permanent, after an update with the sums times `to_mean`.

        - `to_mean`: 0-dim; None if what is kept has no unit
        - `skip`: 0-dim; not zero where the update was left out, which the host need not know
        - `untouched`: parameters that were not updated: their parts are restored
        """
        for index in self._taken:
            flat, before = self._flats[index], self._before[index]
            record_use(before)  # it was made on the lane's stream
            for name in untouched:
                if (part := self._parts[index].get(name)) is not None:
                    flat[part] = before[part]
            weight = torch.ones((), dtype=torch.float64, device=flat.device) if to_mean is None else to_mean
            if skip is not None:
                weight = torch.where(skip > 0, 0.0, weight.to(skip.device))
                flat.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            if is_accelerator(weight.device) or float(weight) != 1:
                torch.lerp(before, flat, weight.to(flat.device, flat.dtype), out=flat)
        self._taken.clear()

    @torch.no_grad()
    def drop(self) -> None:
        """Restores what was taken: no update was made."""
        for index in self._taken:
            record_use(self._before[index])
            self._flats[index].copy_(self._before[index])
        self._taken.clear()


def parts_of(chunk: Chunk, cut: slice | None = None) -> dict[str, slice]:
    """Returns the slices of the parameters of `chunk` in a flat tensor laid out as it, or in a `cut` of that."""
    start, stop = (0, chunk.size) if cut is None else (cut.start, cut.stop)
    bounds = {slot.name: (max(slot.offset, start), min(slot.offset + slot.numel, stop)) for slot in chunk.slots}
    return {name: slice(first - start, last - start) for name, (first, last) in bounds.items() if first < last}


def from_older(states: Mapping[str, State], extra: Mapping[str, Any], own_gradients: bool) -> None:
    """Converts the residuals of an older checkpoint to their unit, approximately.

    They were in the unit of its last step's sums, or, with `own_gradients`, of the sum over replicas.
    """
    if own_gradients:
        factor = 1 / (Plan.from_dict(extra["plan"]).replicas)
    else:
        count = max(1e-6, extra["per_sample"] * extra["global_batch"])
        factor = 2.0 ** round(math.log2(max(1.0, count))) / count
    for state in states.values():
        for tensor in state.tensors.values() if state.on_resize != "mean" else ():
            tensor.mul_(factor)
