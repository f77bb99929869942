"""A dry run of the stages of a pipeline, each as its rank would run it: its own parts, on fakes of what other stages
give. The model is built once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.assembly.model import Local
from shoal.chunks import Gather
from shoal.errors import UserError
from shoal.module.batchnorm import has_batch_statistics
from shoal.module.build import Built
from shoal.pipeline import Pass, Routes, Schedule, Split, look
from shoal.pipeline.passes import Again
from shoal.pipeline.units import Unit
from shoal.planner.prepare import Prepared
from shoal.planner.recording import Agrees, Event, OneStage, Staged
from shoal.planner.workspace import Called

CPU = torch.device("cpu")


class AllStages:
    """The stages of `schedule`, all of them here. `units`: the parts of the model, `cut`: the stage of each."""

    def __init__(
        self, ready: Prepared, built: Built, schedule: Schedule, units: Sequence[Unit], cut: Sequence[int]
    ) -> None:
        self._ready, self._schedule = ready, schedule
        self._split = Split(built, units, cut, range(schedule.stages))
        self._split.follow(ready.local.parallelized.axes)
        self._routes = Routes()
        self._ran: list[tuple[int, int, int, Mapping[str, int]]] = []

    @property
    def by_rank(self) -> list[list[nn.Module]]:
        """The modules in the parts that each rank of the pipeline has."""
        found: list[list[nn.Module]] = [[] for _ in range(self._schedule.ranks)]
        for unit, stage in zip(self._split.units, self._split.stages, strict=True):
            found[self._schedule.rank_of(stage)] += unit.module.modules()
        return found

    def learn(self, forward: Callable[[], Tensor]) -> None:
        """What travels between all stages. UserError for a model that cannot be cut there."""
        self._split.shared(self._schedule.rank_of)
        for stage in range(self._schedule.stages):
            with Called():
                found = look(self._split, stage, self._routes, forward, CPU)
            if isinstance(found, str):
                raise UserError(found)
            self._routes.stages.append(found)
        self._ready.world.ledger.traffic.clear()

    def through(self, log: list[Event], forward: Callable[[], Tensor], gather: Gather) -> None:
        """Forward and backward of each stage alone, whose events come to `log`."""
        self._ran, sent = [], self._ready.sent()
        for stage in range(self._schedule.stages):
            began = len(log)
            backward = began + self._one(stage, log, forward, gather)
            before, sent = sent, self._ready.sent()
            own = {purpose: nbytes - before.get(purpose, 0) for purpose, nbytes in sent.items()}
            self._ran.append((began, backward, len(log), {key: nbytes for key, nbytes in own.items() if nbytes}))

    def _one(self, stage: int, log: list[Event], forward: Callable[[], Tensor], gather: Gather) -> int:
        """Runs a stage; returns how many of its events come before its backward."""
        routes, began = self._routes, len(log)
        values = {
            value: routes.shape(value).empty(CPU) for source in range(stage) for value in routes.between(source, stage)
        }
        current = Pass(self._split, stage, routes, values, CPU)
        if stage:
            self._split.hear(routes.stages[stage - 1].said)
        objective = self._split.run(stage, current, forward)
        if stage < self._schedule.stages - 1:  # of one that comes to an end nothing starts here
            objective = None
        gather.left()
        forwards = len(log) - began
        roots = [each for each in (objective, *current.given.values()) if each is not None and each.requires_grad]
        self._ready.local.randomness.replay()
        if roots:
            with self._split.running(stage, Again(current)):
                torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
        gather.backward_is_over()
        return forwards

    def recorded(self, events: Sequence[Event]) -> Staged:
        """What each stage did of `events`, the log of all."""
        split, own = self._split, [0] * self._schedule.stages
        inside = set[int]()
        for unit, stage in zip(split.units, split.stages, strict=True):
            buffers: Any = {id(each): each.nbytes for each in unit.module.buffers() if id(each) not in inside}
            own[stage] += sum(buffers.values())
            inside |= buffers.keys()
        outside = sum(each.nbytes for each in self._ready.local.module.buffers() if id(each) not in inside)
        stages = []
        for stage, (began, backward, ended, sent) in enumerate(self._ran):
            forward = _without_blanks(events[began:backward])
            whole = (*forward, *events[backward:ended])
            stages.append(OneStage(whole, len(forward), frozenset(split.names(stage)), own[stage], sent))
        local = self._ready.local
        return Staged(
            self._ready.whole,
            tuple(self._ready.parameters),
            tuple(self._ready.options),
            outside,
            tuple(stages),
            local.parallelized.layers,
            agrees_of(local),
        )


def agrees_of(local: Local) -> Agrees:
    """What ranks that have `local` agree on at the end of a step."""
    return Agrees(has_batch_statistics(local.module), local.parallelized.moves_biases)


BLANK = 16
"""Bytes at most of what stands for a value of another stage that is not needed: one element."""


def _without_blanks(events: Sequence[Event]) -> list[Event]:
    """The events of a forward without those of blanks before its own parts, of which there are as many as parts of
    other stages."""
    first = next((place for place, (what, _) in enumerate(events) if what == "use"), len(events))
    kept: list[Event] = []
    blanks: list[int] = []  # places in `kept` of what may be one
    for event in events[:first]:
        what, size = event
        alike = (place for place in reversed(blanks) if kept[place] == ("live", -size))  # type: ignore[operator]
        of_blank = next(alike, None) if what == "live" else None
        if of_blank is not None:
            del kept[of_blank]
            blanks = [place - (place > of_blank) for place in blanks if place != of_blank]
            continue
        if what == "live" and 0 < size <= BLANK:  # type: ignore[operator]
            blanks.append(len(kept))
        kept.append(event)
    return [*kept, *events[first:]]
