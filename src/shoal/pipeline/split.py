"""A model of which a rank has some stages: the parts of the others are gone, and what they give is asked for.

A stage runs the model's own forward (and the loss around it). Where that calls a part of an earlier stage it gets what that stage has computed, where it calls one of a later stage the stage is
through. So nothing has to be known of how a model calls its parts, masks and positions are computed where they are used, and a value that is used two stages further on is as good as one that
is used in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from shoal.errors import UserError
from shoal.module.build import Built
from shoal.module.stand_in import StandIn, Unseen
from shoal.pipeline.captured_outputs import Taps, install
from shoal.pipeline.units import Unit


class Left(BaseException):
    """The forward has come to a part of a later stage: what is to be computed here is computed. Not an Exception, which a loss might catch."""


class Remembers(Protocol):
    """What parts say to each other beside what they are called with: how many tokens there are, which documents."""

    def state(self) -> Any: ...
    def recall(self, state: Any) -> None: ...


class Forward(Protocol):
    """One forward of a stage: what calls of parts give."""

    def own(self, unit: int, part: nn.Module, args: Any, kwargs: Any) -> Any:
        """A part of this stage, to be called."""

    def elsewhere(self, unit: int) -> Any:
        """One of another stage."""


@dataclass(frozen=True)
class Tied:
    """A parameter of parts of several stages, or of none, which all stages have; known by its first name in the whole model."""

    name: str
    stages: tuple[int, ...]


class Split:
    """`built.module` with the parts of `units` that the stages `own` have; `stages[i]` is the stage of `units[i]`. Changes the module."""

    def __init__(self, built: Built, units: Sequence[Unit], stages: Sequence[int], own: Collection[int]) -> None:
        self.module, self.units, self.stages = built.module, list(units), list(stages)
        install(built.module)
        inside = {id(parameter) for unit in units for parameter in unit.module.parameters()}
        self._loose = {id(parameter) for parameter in built.module.parameters()} - inside
        self.tied, self.taps = _tied(built.module, units, stages, self._loose), Taps(units)
        self.between: list[Remembers] = []  # what earlier parts say to later ones
        self.within: list[Remembers] = []  # what is said of a microbatch before its forward
        self._forward: Forward | None = None
        self._stage = -1
        here = {
            id(parameter)
            for unit, stage in zip(units, stages, strict=True)
            if stage in own
            for parameter in unit.module.parameters()
        }
        self._shown: dict[int, Unseen] = {}
        self._stand_ins: list[StandIn] = []
        places = _places(built.module, units)
        self._swapped: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []  # parent, key, part, what stands in for it
        for index, (unit, stage) in enumerate(zip(units, stages, strict=True)):
            stand_in = StandIn(unit.module, partial(self._called, index))
            self._stand_ins.append(stand_in)
            if stage in own:
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
        """Buffers of what every stage has, since it has no parameters."""
        own = {id(module) for unit in self.units for module in unit.module.modules()}
        return [
            f"{name}.{key}".lstrip(".")
            for name, module in self.module.named_modules()
            if id(module) not in own
            for key in module._buffers
        ]

    def names(self, stage: int) -> set[str]:
        """The parameters of a stage that this rank has, by the names that they have in the module here."""
        mine = {
            id(parameter)
            for unit, its in zip(self.units, self.stages, strict=True)
            if its == stage
            for parameter in unit.module.parameters()
        }
        mine |= self._loose
        return {name for name, parameter in self.module.named_parameters() if id(parameter) in mine}

    def said(self) -> list[Any]:
        """What parts have said to those that come after them."""
        return [each.state() for each in self.between]

    def hear(self, said: Sequence[Any]) -> None:
        """What earlier parts have said."""
        for each, state in zip(self.between, said, strict=True):
            each.recall(state)

    def remembered(self) -> Callable[[], None]:
        """Brings back, for a backward, what has been said of the forward that is over."""
        states = [(each, each.state()) for each in (*self.between, *self.within)]

        def recall() -> None:
            for each, state in states:
                each.recall(state)

        return recall

    @contextmanager
    def running(self, stage: int, forward: Forward) -> Iterator[None]:
        """Inside, calls of the model's parts are those of `stage`, and go to `forward`."""
        self._stage, self._forward = stage, forward
        for parent, key, _, stand_in in self._swapped:
            parent._modules[key] = stand_in
        for stand_in in self._stand_ins:
            stand_in.show(self._show)
        try:
            yield
        finally:
            self._forward = None
            for stand_in in self._stand_ins:
                stand_in.show(None)
            for parent, key, part, _ in self._swapped:
                parent._modules[key] = part

    def run(self, stage: int, forward: Forward, function: Callable[[], Any]) -> Any:
        """What `function`, which calls the model, gives as `stage`; None where it left it before the end."""
        with self.running(stage, forward):
            try:
                return function()
            except Left:
                return None

    def _show(self, name: str, parameter: Tensor) -> Unseen:
        """What the model sees of a parameter of a part from outside of it."""
        if id(parameter) not in self._shown:
            own = (each for _, _, part, _ in self._swapped for each in part.parameters() if each.is_floating_point())
            like = next(own, parameter)
            self._shown[id(parameter)] = Unseen.of(name, parameter, like.dtype, like.device)
        return self._shown[id(parameter)]

    def _called(self, unit: int, *args: Any, **kwargs: Any) -> Any:
        if self._forward is None:
            raise UserError(
                f"{self.units[unit].name} was called outside a step: with plan.pp > 1 no rank has the whole model; use engine.step, engine.evaluate or engine.model"
            )
        if self.stages[unit] == self._stage:
            return self._forward.own(unit, self.units[unit].module, args, kwargs)
        if self.stages[unit] > self._stage:
            raise Left
        return self._forward.elsewhere(unit)


def _places(module: nn.Module, units: Sequence[Unit]) -> list[list[tuple[nn.Module, str]]]:
    """Where in `module` each unit is registered: its parents, and under which key."""
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
