"""What a dry run leaves: a model's parameters, and what happens to memory in one microbatch, event by event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal

from shoal.chunks.assign import Described
from shoal.chunks.make import by_stage
from shoal.parallel.tensor import CutLayers

Event = tuple[Literal["saved", "live"], int] | tuple[Literal["use"], frozenset[str]] | tuple[Literal["came"], str]
"""Bytes more or less (saved for backward; of all tensors but parameters), parameters that are used together from now
on, or one whose gradient has come."""


@dataclass(frozen=True)
class Agrees:
    """What of a model ranks agree on at the end of a step: BatchNorm's statistics, biases by which routers balance."""

    statistics: bool = False
    biases: bool = False


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
    - `lengths`: of the events of each of these, which follow each other
    - `layers`: what plan.tp and plan.ep made of each layer
    - `ties`: whether stages share weights; `agrees`: what of the model is agreed on at the end of a step
    - `summed`: parameters of which a hook sees the accumulated gradient
    """

    num_parameters: int
    parameters: tuple[Described, ...]
    options: tuple[dict[str, Any], ...]
    buffers: int
    events: tuple[Event, ...]
    sent: Mapping[str, int] = field(default_factory=dict)
    stages: tuple[tuple[int, int], ...] = ()
    layers: CutLayers = field(default_factory=CutLayers)
    lengths: tuple[int, ...] = ()
    ties: bool = False
    agrees: Agrees = field(default_factory=Agrees)
    summed: Sequence[str] = ()

    @property
    def activations(self) -> int:
        """The most bytes that autograd keeps of one microbatch at a time."""
        return self._most("saved")

    @property
    def backwards(self) -> Iterator[tuple[Event, ...]]:
        """Yields the events of a microbatch, of each stage by itself, since each has a backward of its own."""
        ends = [0, *accumulate(self.lengths or (len(self.events),))]
        yield from (self.events[start:end] for start, end in pairwise(ends))

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


def equal(one: Recording, other: Recording) -> bool:
    """Whether they say the same of memory."""
    return all(
        getattr(one, each) == getattr(other, each)
        for each in ("num_parameters", "parameters", "options", "buffers", "events")
    )


@dataclass(frozen=True)
class OneStage:
    """What one stage of a pipeline does with one microbatch.

    - `events`: in order, of which the first `forwards` come before its backward
    - `names`: of its parameters
    - `buffers`: bytes of those of its parts
    - `sent`: as of a Recording
    """

    events: tuple[Event, ...]
    forwards: int
    names: frozenset[str]
    buffers: int
    sent: Mapping[str, int] = field(default_factory=dict)

    @property
    def kept(self) -> int:
        """Bytes that backward keeps of one microbatch."""
        return sum(value for what, value in self.events[: self.forwards] if what == "saved")  # type: ignore[misc]


@dataclass(frozen=True)
class Staged:
    """What all stages of a pipeline do. `buffers`: bytes of those outside of all parts, which every rank has; the rest
    as of a Recording of all stages together."""

    num_parameters: int
    parameters: tuple[Described, ...]
    options: tuple[dict[str, Any], ...]
    buffers: int
    stages: tuple[OneStage, ...]
    layers: CutLayers = field(default_factory=CutLayers)
    agrees: Agrees = field(default_factory=Agrees)

    def of(self, own: Sequence[int]) -> Recording:
        """What a rank does that has the stages `own`."""
        mine = [self.stages[stage] for stage in own]
        names = {stage: each.names for stage, each in zip(own, mine, strict=True)}
        having = Counter(name for each in self.stages for name in each.names)
        together = frozenset[str]().union(*names.values())
        sent: dict[str, int] = {}
        for each in mine:
            for purpose, nbytes in each.sent.items():
                sent[purpose] = sent.get(purpose, 0) + nbytes
        return Recording(
            self.num_parameters,
            tuple(by_stage([each for each in self.parameters if each[0] in together], names)),
            self.options,
            self.buffers + sum(each.buffers for each in mine),
            tuple(event for each in mine for event in each.events),
            sent,
            tuple((stage, each.kept) for stage, each in zip(own, mine, strict=True)),
            self.layers,
            tuple(len(each.events) for each in mine),
            max(having.values(), default=0) > 1,
            self.agrees,
        )
