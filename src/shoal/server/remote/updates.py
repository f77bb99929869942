"""A module's part in distributed optimizers: each has a state of its own here."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from shoal.errors import UserError
from shoal.server.remote.gradients import Gradients
from shoal.server.remote.leaves import Versions
from shoal.server.remote.messages import Measure, Optimize, Update
from shoal.server.remote.stepper import Stepper


class Updates:
    """Updates `module` by `gradients`. For any thread; `guard` is held while parameters change."""

    def __init__(
        self, module: nn.Module, gradients: Gradients, versions: Versions | None, guard: threading.Lock
    ) -> None:
        self._module, self._gradients, self._versions, self._guard = module, gradients, versions, guard
        self._steppers: dict[str, tuple[Stepper, set[object]]] = {}

    @property
    def any(self) -> bool:
        """Whether somebody may step the module."""
        return bool(self._steppers)

    def make(self, client: object, asked: Optimize, options: object) -> None:
        """Has an optimizer, here and at owners below. Raises UserError, TypeError or ValueError for what is none."""
        if not isinstance(options, dict):
            raise UserError("no options of an optimizer")
        with self._guard:
            if asked.key not in self._steppers:
                self._steppers[asked.key] = Stepper(asked.key, asked.optimizer, options, [self._module]), set()
            stepper, clients = self._steppers[asked.key]
            new = not clients
            clients.add(client)
        if new:
            stepper.remotes()

    def measure(self, asked: Measure) -> float:
        """Returns the sum of squares of a context's gradients, here and below; 0 where it was asked for already."""
        stepper = self._stepper(asked.key)
        if not stepper.begins("measure", asked.step):
            return 0.0
        return stepper.measure(self._gradients.total(asked.context).values(), asked.context, asked.step)

    def update(self, asked: Update, course: object) -> None:
        """Steps by a context's gradients times a factor, here and below, unless that has been done already."""
        stepper = self._stepper(asked.key)
        if not isinstance(course, dict) or not course.keys() <= stepper.course.keys():
            raise UserError("no options of a step")
        if not stepper.begins("update", asked.step):
            return
        stepper.follow(course)
        kept = self._gradients.total(asked.context)
        found = {parameter: kept[name] for name, parameter in stepper.parameters.items() if name in kept}

        def step() -> None:
            with self._guard:
                if self._versions is not None:
                    self._versions.move(found)
                with _given(found, asked.factor, stepper.parameters.values()):
                    stepper.optimizer.step()

        stepper.update(step, asked.context, asked.step, asked.factor)

    def leave(self, client: object) -> None:
        """Forgets the optimizers that only this client has asked for."""
        with self._guard:
            for key, (_, clients) in list(self._steppers.items()):
                clients.discard(client)
                if not clients:
                    del self._steppers[key]

    def _stepper(self, key: str) -> Stepper:
        with self._guard:
            if key not in self._steppers:
                raise UserError("the optimizer is not here: make a DistributedOptimizer for this module")
            return self._steppers[key][0]


@contextmanager
def _given(found: Mapping[nn.Parameter, Tensor], factor: float, all_of: Iterable[nn.Parameter]) -> Iterator[None]:
    """Has these gradients times `factor` in `.grad`, and none for other parameters; what was there comes back."""
    before = {parameter: parameter.grad for parameter in all_of}
    for parameter in before:
        gradient = found.get(parameter)
        parameter.grad = gradient * factor if gradient is not None and factor < 1.0 else gradient
    try:
        yield
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient
