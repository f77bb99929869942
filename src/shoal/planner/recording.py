"""What a dry run leaves: a model's parameters, and what happens to memory in one microbatch, event by event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.chunks.assign import Described
from shoal.parallel.tensor import CutLayers

Event = tuple[Literal["saved", "live"], int] | tuple[Literal["use"], frozenset[str]] | tuple[Literal["came"], str]
"""Bytes more or less (saved for backward; of all tensors but parameters), parameters that are used together from now
on, or one whose gradient has come."""


@dataclass(frozen=True)
class Recording:
    """What a rank does with one microbatch.

    - `num_parameters`: elements of the whole model's parameters
    - `parameters`: those of the rank, in the order in which chunks are cut
    - `options`: of each optimizer group
    - `buffers`: bytes
    - `events`: in order
    - `sent`: bytes of payload to and from other ranks in forward and backward, by purpose
    - `stages`: those of the rank, each with the bytes that backward keeps of one microbatch
    - `layers`: what plan.tp and plan.ep made of each layer
    """

    num_parameters: int
    parameters: tuple[Described, ...]
    options: tuple[dict[str, Any], ...]
    buffers: int
    events: tuple[Event, ...]
    sent: Mapping[str, int] = field(default_factory=dict)
    stages: tuple[tuple[int, int], ...] = ()
    layers: CutLayers = field(default_factory=CutLayers)

    @property
    def activations(self) -> int:
        """The most bytes that autograd keeps of one microbatch at a time."""
        return self._most("saved")

    @property
    def temporaries(self) -> int:
        """By how much the most of all tensors together, new gradients and results that die at once among them, is
        above `activations`."""
        return max(0, self._most("live") - self.activations)

    def _most(self, kind: str) -> int:
        now = most = 0
        for what, value in self.events:
            if what == kind:
                now += value  # type: ignore[operator]
                most = max(most, now)
        return most
