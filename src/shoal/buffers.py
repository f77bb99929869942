"""Buffers that a forward changes and whose rule nobody told us: replicas are made equal after each step.

BatchNorm's statistics compose exactly (see batchnorm). Of others (a moving average of a codebook, a counter) floating ones become the mean
over microbatches and the rest the largest: equal on all ranks, near what one process would have, and documented as not exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.comm import Group


@contextmanager
def buffers_untouched(root: nn.Module) -> Iterator[None]:
    """Whatever a forward inside does to the buffers of `root` is done to copies: a backward to come may need them as they are."""
    places = [(owner, name, buffer) for owner in root.modules() for name, buffer in owner._buffers.items() if buffer is not None]
    copies: dict[int, Tensor] = {}
    for owner, name, buffer in places:
        if id(buffer) not in copies:
            copies[id(buffer)] = buffer.clone()
        owner._buffers[name] = copies[id(buffer)]
    try:
        yield
    finally:
        for owner, name, buffer in places:
            owner._buffers[name] = buffer


class OtherBuffers:
    """The persistent buffers of `root` outside BatchNorm. Non-persistent ones are derived tables, which nobody changes."""

    def __init__(self, root: nn.Module) -> None:
        self._places = [
            (owner, name)
            for owner in root.modules()
            if not isinstance(owner, _BatchNorm)
            for name, buffer in owner._buffers.items()
            if buffer is not None and name not in owner._non_persistent_buffers_set and not buffer.is_complex()
        ]
        self._before: list[tuple[Tensor, int]] = []

    def __len__(self) -> int:
        return len(self._places)

    def begin(self) -> None:
        """Remembers where the step starts."""
        self._before = [(buffer, buffer._version) for buffer in self._now()]

    def changed(self) -> bool:
        """Whether this rank's forwards wrote or re-bound any of them since."""
        return any(
            buffer is not before or buffer._version != version
            for buffer, (before, version) in zip(self._now(), self._before, strict=True)
        )

    def _now(self) -> list[Tensor]:
        return [cast(Tensor, owner._buffers[name]) for owner, name in self._places]

    def merge(self, group: Group, microbatches: int) -> None:
        """Makes them equal over `group`; this rank ran `microbatches`."""
        total = group.all_reduce(torch.tensor(float(microbatches)))
        for buffer in self._now():
            if buffer.is_floating_point():
                mean: Tensor = group.all_reduce(buffer.double() * microbatches, purpose="buffers") / total.to(buffer.device)
                buffer.copy_(mean)
            else:
                wide = buffer.to(torch.int64)
                buffer.copy_(group.all_reduce(wide, "max", purpose="buffers"))
