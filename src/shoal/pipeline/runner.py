"""One rank of a pipeline: learns what travels between its stages and others, and runs steps and evaluations by their
schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from shoal.comm import Group, World
from shoal.pipeline.actions import Schedule
from shoal.pipeline.find_routes import find_routes
from shoal.pipeline.interpreter import Interpreter, Work
from shoal.pipeline.p2p import Message, Way, messages_to
from shoal.pipeline.routes import Routes, Shape
from shoal.pipeline.split import Split


class Runner:
    """Runs the stages of one rank of `group`, the ranks of one pipeline. `schedule(microbatches)` gives the schedule of
    a step."""

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
        self._names = {stage: split.names(stage) for stage in self.own}

    @property
    def tied(self) -> dict[str, list[int]]:
        """The weights that ranks of the pipeline share, by name: the places of all that have them."""
        places = {each.name: sorted({self._rank_of(stage) for stage in each.stages}) for each in self.split.tied}
        return {name: having for name, having in places.items() if len(having) > 1}

    @property
    def flushes(self) -> bool:
        """Whether a step ends with all its backwards."""
        return self._schedule(1).flushes

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, and with it the loss."""
        return self._number - 1 in self.own

    @property
    def behind(self) -> int:
        """How many stages come after this rank's last one."""
        return self._number - 1 - self.own[-1]

    @property
    def rounds(self) -> int:
        """Backwards of each microbatch on this rank."""
        return len(self.own)

    def learn(
        self,
        kinds: Sequence[Any],
        run: Callable[[int], Any],
        alike: Group | None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Finds out what travels where of microbatches of `kinds` that have not been seen yet.

        All ranks of the pipeline call it alike.

        - `run(place)`: gives the loss of one
        - `alike`: pipelines whose ranks meet in their forwards, and so find out together
        - `around`: wraps the forwards, if there are any
        """
        new = torch.tensor([kind not in self._known and kind not in kinds[:place] for place, kind in enumerate(kinds)])
        if alike is not None:
            new = alike.all_reduce(new.to(torch.int32), "max", purpose="kinds").bool()
        if not new.any():
            return
        for place in new.nonzero().flatten().tolist():
            with around():
                found = find_routes(
                    self.split, self._number, self._rank_of, self.group, partial(run, place), self._device
                )
            self._known[kinds[place]] = found
            self._messages.cache_clear()
            pairs = [(self._rank_of(source), self._rank_of(target)) for source, target in found.pairs()]
            self.interpreter.open([(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]])

    def train(self, kinds: Sequence[Any], work: Work) -> None:
        """One step of microbatches of `kinds`."""
        order = self._begin(kinds, self._schedule).orders[self.group.rank]
        weights = [place for place, action in enumerate(order) if action.kind in ("B", "W")]
        final = {order[place].stage: place for place in weights}
        with functorch_config.patch(
            donated_buffer=False
        ):  # compiled blocks keep theirs until a second half has come by
            for place, action in enumerate(order):
                complete = set[str]()
                if place == final[action.stage]:
                    later = {name for stage, at in final.items() if at > place for name in self._names[stage]}
                    complete = self._names[action.stage] - later
                self.interpreter.do(action, work, complete, place == weights[-1])
        self.interpreter.settle()

    def evaluate(self, kinds: Sequence[Any], work: Work) -> None:
        """The forwards alone."""
        for action in self._begin(kinds, self._forwards).orders[self.group.rank]:
            self.interpreter.forward(action, work, "evaluation")
            self.interpreter.clear()
        self.interpreter.settle()

    def of_last_stage(self, value: Tensor | None) -> Tensor:
        """The `value` that the last stage has, on all ranks of the pipeline, which call it alike."""
        source = self._rank_of(self._number - 1)
        shape = self.group.broadcast_object(
            None if value is None else Shape(tuple(value.shape), value.dtype), src=source
        )
        found = value if value is not None and self.group.rank == source else shape.empty(self._device)
        return self.group.broadcast(found, src=source, purpose="result")

    def add(self, microbatch: int, kind: Any) -> None:
        """Adds a microbatch of `kind` to a schedule without a flush, by its number."""
        (stage,) = self.own
        self.interpreter.add(microbatch, stage, self._known[kind])

    def _begin(self, kinds: Sequence[Any], schedule: Callable[[int], Schedule]) -> Schedule:
        routes = {number: self._known[kind] for number, kind in enumerate(kinds)}
        self.interpreter.begin(routes, self._messages(tuple(kinds), schedule))
        return schedule(len(kinds))

    def close(self) -> None:
        """Ends the lanes on which values travel."""
        self.interpreter.close()


def _messages(
    place: int, known: Mapping[Any, Routes], kinds: tuple[Any, ...], schedule: Callable[[int], Schedule]
) -> dict[tuple[Way, int], list[Message]]:
    return messages_to(
        place, schedule(len(kinds)), lambda source, target, at: bool(known[kinds[at]].between(source, target))
    )
