"""Runs the stages of one rank: learns which values travel between stages, and runs steps and evaluations by the
schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from shoal.comm import Group, World
from shoal.pipeline.actions import GIVES_GRADIENTS, Schedule
from shoal.pipeline.find_routes import find_routes
from shoal.pipeline.interpreter import Interpreter, Work
from shoal.pipeline.p2p import Message, Way, messages_to
from shoal.pipeline.routes import Routes, Shape
from shoal.pipeline.split import Split


class Runner:
    """Runs the stages of one rank of a pipeline.

    split: the model with this rank's stages
    schedule: schedule(microbatches) is that of a step
    group: the ranks of the pipeline
    world: gives groups, lanes and the ledger

    `own`: the stages of this rank. `names`: of the parameters of each.
    """

    def __init__(self, split: Split, schedule: Callable[[int], Schedule], group: Group, world: World) -> None:
        self.split, self.group, self._device = split, group, world.device
        self._schedule = lru_cache(maxsize=16)(schedule)
        self._known: dict[Any, Routes] = {}
        self._messages = lru_cache(maxsize=16)(partial(_messages, group.rank, self._known))
        one = self._schedule(1)
        self._rank_of, self._number = one.rank_of, one.stages
        self.interpreter = Interpreter(split, group, world, one.rank_of, one.stages)
        self._forwards = lru_cache(maxsize=16)(one.forwards)
        self.own = one.stages_of(group.rank)
        self.names = {stage: split.names(stage) for stage in self.own}

    @cached_property
    def tied(self) -> dict[str, list[int]]:
        """The weights that ranks of the pipeline share: name -> indices of the ranks that have them."""
        return self.split.shared(self._rank_of)

    @property
    def flushes(self) -> bool:
        """True if a step ends with all its backwards."""
        return self._schedule(1).flushes

    @property
    def is_last(self) -> bool:
        """True if this rank has the last stage, and with it the loss."""
        return self._number - 1 in self.own

    @property
    def behind(self) -> int:
        """Number of stages after this rank's last one."""
        return self._number - 1 - self.own[-1]

    def backwards(self, microbatches: int) -> list[int]:
        """Lists the stages of this rank's backwards in a step, in order."""
        return self._schedule(microbatches).backwards(self.group.rank)

    def learn(
        self,
        kinds: Sequence[Any],
        run: Callable[[int], Any],
        alike: Group | None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Finds the routes of kinds of microbatches that have not been seen yet. Collective over the pipeline.

        kinds: of the microbatches of a step
        run: run(index) gives the loss of one of them
        alike: group of pipelines whose forwards contain collectives, and which therefore learn together; None: this one
            alone
        around: wraps these forwards
        """
        new = [kind not in self._known and kind not in kinds[:place] for place, kind in enumerate(kinds)]
        if alike is not None:
            flags = alike.all_reduce(torch.tensor(new, dtype=torch.int32), "max", purpose="kinds")
            new = [bool(flag) for flag in flags.tolist()]
        for place in (place for place, is_new in enumerate(new) if is_new):
            with around():
                found = find_routes(
                    self.split, self._number, self._rank_of, self.group, partial(run, place), self._device
                )
            self._known[kinds[place]] = found
            self._messages.cache_clear()
            pairs = [(self._rank_of(source), self._rank_of(target)) for source, target in found.pairs()]
            self.interpreter.open([(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]])

    def train(self, kinds: Sequence[Any], work: Work) -> None:
        """Runs one step of microbatches of `kinds`."""
        order = self._begin(kinds, self._schedule).orders[self.group.rank]
        weights = [place for place, action in enumerate(order) if action.kind in GIVES_GRADIENTS]
        final = {order[place].stage: place for place in weights}
        # a compiled block must keep its buffers for the second half of backward
        with functorch_config.patch(donated_buffer=False):
            for place, action in enumerate(order):
                complete = set[str]()
                if place == final[action.stage]:
                    later = {name for stage, at in final.items() if at > place for name in self.names[stage]}
                    complete = self.names[action.stage] - later
                self.interpreter.do(action, work, complete, place == weights[-1])
        self.interpreter.settle()

    def evaluate(self, kinds: Sequence[Any], work: Work) -> None:
        """Runs the forwards only."""
        for action in self._begin(kinds, self._forwards).orders[self.group.rank]:
            self.interpreter.forward(action, work, "evaluation")
            self.interpreter.clear()
        self.interpreter.settle()

    def of_last_stage(self, value: Tensor | None) -> Tensor:
        """Broadcasts the `value` of the last stage; returns it on all ranks. Collective over the pipeline."""
        source = self._rank_of(self._number - 1)
        shape = self.group.broadcast_object(
            None if value is None else Shape(tuple(value.shape), value.dtype), src=source
        )
        found = value if value is not None and self.group.rank == source else shape.empty(self._device)
        return self.group.broadcast(found, src=source, purpose="result")

    def add(self, microbatch: int, kind: Any) -> None:
        """Adds microbatch number `microbatch`, of `kind`, to a schedule without a flush."""
        (stage,) = self.own
        self.interpreter.add(microbatch, stage, self._known[kind])

    def _begin(self, kinds: Sequence[Any], schedule: Callable[[int], Schedule]) -> Schedule:
        routes = {number: self._known[kind] for number, kind in enumerate(kinds)}
        self.interpreter.begin(routes, self._messages(tuple(kinds), schedule))
        return schedule(len(kinds))

    def close(self) -> None:
        """Closes the lanes and groups on which values travel."""
        self.interpreter.close()


def _messages(
    place: int, known: Mapping[Any, Routes], kinds: tuple[Any, ...], schedule: Callable[[int], Schedule]
) -> dict[tuple[Way, int], list[Message]]:
    return messages_to(
        place, schedule(len(kinds)), lambda source, target, at: bool(known[kinds[at]].between(source, target))
    )
