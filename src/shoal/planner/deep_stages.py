"""The stages of a model from those of models with another number of blocks, as `depth` does it for models without
stages.

The first stage has the first blocks, the last one the last, and all between are alike. A stage of at least `SHALLOW`
blocks says what any with more or fewer of them does, but for a single one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from shoal.module.blank import on_meta
from shoal.pipeline import given_stages, schedule_of, stages_of, units_of
from shoal.plan import Plan
from shoal.planner.depth import Blocks
from shoal.planner.recording import OneStage, Staged, equal
from shoal.planner.repeats import REPEATED, SHALLOW, Shift, more_events, more_parameters, repeated


def blocks_by_stage(shallow: Callable[[], nn.Module], number: int, plan: Plan) -> tuple[int, ...] | None:
    """How many blocks each stage of `plan` has of a model with `number` blocks that is `shallow`'s with more in the
    middle; None where the plan names the parts of stages. Raises UserError where there are fewer blocks than stages."""
    given = given_stages(plan)
    if given is not None and not all(isinstance(each, int) for each in given):
        return None
    units = units_of(on_meta(shallow))
    places = [place for place, unit in enumerate(units) if unit.is_block]
    if len(places) != SHALLOW:
        return None
    at = places[REPEATED]
    units = [*units[: at + 1], *[units[at]] * (number - SHALLOW), *units[at + 1 :]]
    cut = stages_of(units, schedule_of(plan, 1).stages, given)
    counts = Counter(stage for unit, stage in zip(units, cut, strict=True) if unit.is_block)
    return tuple(counts[stage] for stage in sorted(counts))


End = Literal["first", "between", "last"]
"""Where a stage is in its pipeline."""


class KnownStages:
    """Stages that have been run dry, of models that differ in the number of their `blocks` alone."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks, self._shifted = blocks, Shift(blocks.name)
        self._run: Staged | None = None
        self._number = 0
        self._stages: dict[tuple[End, int], OneStage] = {}

    def add(self, run: Staged, numbers: Sequence[int]) -> None:
        """Adds the stages of a model, which have so many blocks each."""
        if self._run is None:
            self._run, self._number = run, sum(numbers)
        for place, (stage, end, number) in enumerate(zip(run.stages, ends_of(numbers), numbers, strict=True)):
            self._stages.setdefault((end, number), moved(stage, -sum(numbers[:place]), self._shifted))

    def lacking(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The blocks of each stage of a small pipeline, of more than `SHALLOW` in all, that has to be run dry before
        `of(numbers)` knows all stages; empty where it does."""
        kinds = zip(ends_of(numbers), numbers, strict=True)
        unknown = {(end, min(number, SHALLOW)) for end, number in kinds if not self._source(end, number)}
        if not unknown:
            return ()
        first, last = (next((number for at, number in unknown if at == end), 0) for end in ("first", "last"))
        between = {number for end, number in unknown if end == "between"}
        if SHALLOW in between:
            between &= {1, SHALLOW}
        others = (*sorted(between), last or 1)
        if first == 1:  # of which no longer one can be made
            more = math.ceil(max(0, SHALLOW - sum(others)) / others[0])
            return (first, *others[:1] * more, *others)
        return (first or REPEATED if sum(others) > REPEATED else SHALLOW, *others)

    def of(self, numbers: Sequence[int]) -> Staged | None:
        """The stages of a model with so many blocks in each; None if those in the middle of one that has been run
        differ in what they do. `sent` and `layers` stay those of the first run."""
        if self._run is None or (numbers[0] < REPEATED and not self._blocks.from_second):
            return None
        more = sum(numbers) - self._number
        parameters = more_parameters(self._run.parameters, more, self._shifted, self._number)
        if parameters is None:
            return None
        stages: list[OneStage] = []
        for place, (end, number) in enumerate(zip(ends_of(numbers), numbers, strict=True)):
            source = self._source(end, number)
            found = _with_blocks(self._stages[end, source], source, number, self._blocks, self._shifted)
            if found is None:
                return None
            stages.append(moved(found, sum(numbers[:place]), self._shifted))
        whole = self._run.num_parameters + more * self._blocks.parameters
        return replace(self._run, num_parameters=whole, parameters=parameters, stages=tuple(stages))

    def _source(self, end: End, number: int) -> int:
        """The blocks of a known stage of which one of `number` can be made, 0 where there is none."""
        known = [own for other, own in self._stages if other == end]
        longer = (own for own in known if own >= SHALLOW and number > 1)
        return number if number in known else next(longer, 0)


def equal_stages(one: Staged | None, other: Staged) -> bool:
    """Whether both say the same of memory."""
    if one is None or len(one.stages) != len(other.stages):
        return False
    both = [(one.of([stage]), other.of([stage])) for stage in range(len(other.stages))]
    return all(equal(*pair) and pair[0].stages == pair[1].stages for pair in both)


def ends_of(stages: Sequence[Any]) -> list[End]:
    """Where each of the stages of a pipeline is."""
    last = len(stages) - 1
    return ["first" if place == 0 else "last" if place == last else "between" for place in range(len(stages))]


def _with_blocks(one: OneStage, known: int, number: int, blocks: Blocks, shifted: Shift) -> OneStage | None:
    """Makes a stage of `number` blocks of one of `known`, the first of its pipeline's or as if it were."""
    if number == known:
        return one
    at, more = repeated(one.events, shifted, known), number - known
    events = None if at is None else more_events(one.events, more, shifted, at)
    if at is None or events is None:
        return None
    names = set[str]()
    for name in one.names:
        block = shifted.block(name)
        if block is None or block < min(REPEATED, number - 1):
            names.add(name)
        elif block == known - 1:
            names.add(shifted.name(name, more))
        if block == REPEATED:
            names |= {shifted.name(name, by) for by in range(number - 1 - REPEATED)}
    forwards, buffers = one.forwards + more * at.length, one.buffers + more * blocks.buffers
    return replace(one, events=events, forwards=forwards, names=frozenset(names), buffers=buffers)


def moved(one: OneStage, by: int, shifted: Shift) -> OneStage:
    """Returns the stage as one of blocks that come so many later."""
    if not by:
        return one
    events = tuple(shifted.events(one.events, by))
    return replace(one, events=events, names=frozenset(shifted.name(name, by) for name in one.names))
