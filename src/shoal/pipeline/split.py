"""A model of which a rank has some stages: the parts of the other stages are removed, and their results come from
messages.

A stage runs the model's own forward (and the loss around it). When that calls a part of an earlier stage it gets the
result that the stage has computed; when it calls a part of a later stage, this stage is done. So nothing needs to be
known of how a model calls its parts, masks and positions are computed where they are used, and a value may be used by
any later stage, not only the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from shoal.errors import UserError
from shoal.module.build import Built
from shoal.module.stand_in import StandIn, Unseen
from shoal.module.value_checks import distributions_unchecked
from shoal.parallel.axis import Axis, Remembers
from shoal.pipeline.captured_outputs import Taps, hand_over, install
from shoal.pipeline.units import Unit


class Left(BaseException):
    """Raised when the forward reaches a part of a later stage, where the work of this one ends.

    It is not an Exception, which a loss might catch.
    """


class Forward(Protocol):
    """The forward of a stage on a microbatch: it supplies the results of calls of parts."""

    def own(self, unit: int, part: nn.Module, args: Any, kwargs: Any) -> Any:
        """Returns the result of a part of this stage, which it calls."""

    def elsewhere(self, unit: int, args: Any, kwargs: Any) -> Any:
        """Returns the result of a part of another stage."""


@dataclass(frozen=True)
class Tied:
    """A parameter that several stages have, under its first name in the whole model.

    It belongs to parts of these stages, or to no part, in which case all stages have it.
    """

    name: str
    stages: tuple[int, ...]


class Split:
    """Removes from `built.module` the parts that this rank does not have, and routes calls of parts to a `Forward`.

    built: the model, which is changed
    units: its parts, in the order of calls
    stages: the stage of each unit
    own: the stages of this rank
    """

    def __init__(self, built: Built, units: Sequence[Unit], stages: Sequence[int], own: Collection[int]) -> None:
        self.module, self.units, self.stages = built.module, list(units), list(stages)
        install(built.module)
        inside = {id(parameter) for unit in units for parameter in unit.module.parameters()}
        self._loose = {id(parameter) for parameter in built.module.parameters()} - inside
        self.tied, self.taps = _tied(built.module, units, stages, self._loose), Taps(units)
        self._carried: list[Remembers] = []  # sent from earlier parts to later ones
        self._noted: list[Remembers] = []  # set for a microbatch before its forward
        self._forward: Forward | None = None
        self._stage = -1
        ours = [unit.module for unit, stage in zip(units, stages, strict=True) if stage in own]
        here = {id(parameter) for part in ours for parameter in part.parameters()}
        inner = {id(each) for part in ours for each in list(part.modules())[1:]}
        self._shown: dict[int, Unseen] = {}
        self._stand_ins: list[StandIn] = []
        # a part that lies in another of this rank too (positions that blocks share) is called there as it is
        within = {*inner, *map(id, ours)}
        places = [[each for each in found if id(each[0]) not in within] for found in _places(built.module, units)]
        # (parent, key, part, its stand-in)
        self._swapped: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
        for index, (unit, stage) in enumerate(zip(units, stages, strict=True)):
            stand_in = StandIn(unit.module, partial(self._called, index), unit.name)
            self._stand_ins.append(stand_in)
            hand_over(unit.module, stand_in)
            if stage in own or id(unit.module) in inner:
                self._swapped += [(parent, key, unit.module, stand_in) for parent, key in places[index]]
                continue
            for name, parameter in unit.module.named_parameters():
                if id(parameter) in here:
                    stand_in.hold(name, parameter)
            for parent, key in places[index]:
                parent._modules[key] = stand_in

    @property
    def elsewhere(self) -> list[str]:
        """Names of the parts that this rank does not have."""
        return [name for name, part in self.module.named_modules() if isinstance(part, StandIn)]

    @property
    def common_buffers(self) -> list[str]:
        """Names of the buffers of modules outside of all parts, which every stage has."""
        return [f"{name}.{key}".lstrip(".") for name, module in self._outside() for key in module._buffers]

    @property
    def common_values(self) -> list[Tensor | None]:
        """These buffers, as they are now."""
        return [value for _, module in self._outside() for value in module._buffers.values()]

    def _outside(self) -> Iterator[tuple[str, nn.Module]]:
        own = {id(module) for unit in self.units for module in unit.module.modules()}
        return ((name, module) for name, module in self.module.named_modules() if id(module) not in own)

    def shared(self, rank_of: Callable[[int], int]) -> dict[str, list[int]]:
        """Returns the weights that ranks of the pipeline share: name -> indices of the ranks that have them.

        rank_of: rank_of(stage) is the rank that has it

        Raises UserError, on every rank alike, where several sets of ranks share weights with one.
        """
        places = {each.name: sorted({rank_of(stage) for stage in each.stages}) for each in self.tied}
        found = {name: having for name, having in places.items() if len(having) > 1}
        sets = {tuple(having) for having in found.values()}
        for rank in sorted({rank for having in sets for rank in having}):
            if len(several := sorted(each for each in sets if rank in each)) > 1:
                raise UserError(
                    f"plan.pp: weights are shared by the ranks {several} of the pipeline, and each can be in one such "
                    f"set: {sorted(found)}; name the stages by hand (plan.stages) so that these are the same ranks, or "
                    "take plan.pp = 2"
                )
        return found

    def follow(self, axes: Iterable[Axis]) -> None:
        """Brings the state of the other `axes` along with what travels between stages."""
        for axis in axes:
            self._carried += axis.carried
            self._noted += axis.noted

    def names(self, stage: int) -> set[str]:
        """Returns the parameters that this rank has of `stage`, by their names in the module on this rank."""
        mine = {
            id(parameter)
            for unit, its in zip(self.units, self.stages, strict=True)
            if its == stage
            for parameter in unit.module.parameters()
        }
        mine |= self._loose
        return {name for name, parameter in self.module.named_parameters() if id(parameter) in mine}

    def said(self) -> list[Any]:
        """Returns the state that parts leave for those that come after them."""
        return [each.state() for each in self._carried]

    def hear(self, said: Sequence[Any]) -> None:
        """Restores the state `said` that earlier parts have left."""
        for each, state in zip(self._carried, said, strict=True):
            each.recall(state)

    def remembered(self) -> Callable[[], None]:
        """Returns a function that restores, for a backward, the state of the forward that has just ended."""
        states = [(each, each.state()) for each in (*self._carried, *self._noted)]

        def recall() -> None:
            for each, state in states:
                each.recall(state)

        return recall

    @contextmanager
    def running(self, stage: int, forward: Forward) -> Iterator[None]:
        """Makes the model run as `stage` inside the context: calls of its parts go to `forward`."""
        self._stage, self._forward = stage, forward
        for parent, key, _, stand_in in self._swapped:
            parent._modules[key] = stand_in
        for stand_in, its in zip(self._stand_ins, self.stages, strict=True):
            stand_in.show(self._show, here=its == stage)
        try:
            yield
        finally:
            self._forward = None
            for stand_in in self._stand_ins:
                stand_in.show(None)
            for parent, key, part, _ in self._swapped:
                parent._modules[key] = part

    def run(self, stage: int, forward: Forward, function: Callable[[], Any]) -> Any:
        """Runs `function`, which calls the model, as `stage`; returns its result, or None if a later stage was
        reached."""
        with self.running(stage, forward), distributions_unchecked():
            try:
                return function()
            except Left:
                return None

    def _show(self, name: str, parameter: Tensor) -> Unseen:
        """Returns the stand-in that the model sees for a tensor of a part, from outside of that part."""
        if id(parameter) not in self._shown:
            own = (each for _, _, part, _ in self._swapped for each in part.parameters() if each.is_floating_point())
            like = next(own, parameter)
            self._shown[id(parameter)] = Unseen.of(name, parameter, like.dtype, like.device)
        return self._shown[id(parameter)]

    def _called(self, unit: int, *args: Any, **kwargs: Any) -> Any:
        if self._forward is None:
            raise UserError(
                f"{self.units[unit].name} was called outside a step: with plan.pp > 1 no rank has the whole model; use "
                "engine.step, engine.evaluate or engine.model"
            )
        if self.stages[unit] == self._stage:
            return self._forward.own(unit, self.units[unit].module, args, kwargs)
        if self.stages[unit] > self._stage:
            raise Left
        return self._forward.elsewhere(unit, args, kwargs)


def _places(module: nn.Module, units: Sequence[Unit]) -> list[list[tuple[nn.Module, str]]]:
    """Returns for each unit where it is registered in `module`, as (parent, key)."""
    index = {id(unit.module): number for number, unit in enumerate(units)}
    found: list[list[tuple[nn.Module, str]]] = [[] for _ in units]
    for parent in module.modules():
        for key, child in parent._modules.items():
            if id(child) in index:
                found[index[id(child)]].append((parent, key))
    return found


def _tied(module: nn.Module, units: Sequence[Unit], stages: Sequence[int], loose: Collection[int]) -> list[Tied]:
    having: dict[int, set[int]] = {each: set(stages) for each in loose}
    for unit, stage in zip(units, stages, strict=True):
        for parameter in unit.module.parameters():
            having.setdefault(id(parameter), set()).add(stage)
    return [
        Tied(name, tuple(sorted(having[id(parameter)])))
        for name, parameter in module.named_parameters()
        if len(having[id(parameter)]) > 1
    ]
