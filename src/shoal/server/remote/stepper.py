"""What one process does of a distributed optimizer's step: its own parameters, then those of owners below."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoal.errors import check_choice
from shoal.optim.named import OPTIMIZERS
from shoal.server.remote.messages import Drop, Measure, Optimize, Update
from shoal.server.remote.module import RemoteModule
from shoal.server.remote.payload import taken_apart

COURSE = ("lr", "momentum", "betas")
"""Options that go with each step: torch's schedules change the learning rate, and the cyclic ones momentum."""
_STEPS = 256  # steps that are remembered, so that each is taken once
T = TypeVar("T")


class Stepper:
    """The optimizer `kind` of torch's over the parameters of `modules`, by name, and over remote modules among them.

    key: names the whole optimizer at all owners.
    Raises UserError for an optimizer that is not known, TypeError or ValueError for options that it does not take.
    """

    def __init__(self, key: str, kind: str, options: Mapping[str, Any], modules: Sequence[nn.Module]) -> None:
        check_choice(f"{kind!r} is not one of", kind, OPTIMIZERS)
        self._key, self._kind, self._options, self._modules = key, kind, dict(options), modules
        self.parameters = {
            f"{index}.{name}" if len(modules) > 1 else name: parameter
            for index, module in enumerate(modules)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        once = list(dict.fromkeys(self.parameters.values()))
        # Without parameters an empty one, of which only the options are used.
        self.optimizer = OPTIMIZERS[kind](once or [nn.Parameter(torch.zeros(0))], **self._options)
        self._guard = threading.Lock()
        self._done: deque[tuple[str, str]] = deque(maxlen=2 * _STEPS)
        self._told: set[RemoteModule] = set()

    @property
    def course(self) -> dict[str, Any]:
        """The options of the next step that a schedule may have changed."""
        group = self.optimizer.param_groups[0]
        return {name: group[name] for name in COURSE if name in group}

    def follow(self, course: Mapping[str, Any]) -> None:
        """Steps by these options from now on."""
        for group in self.optimizer.param_groups:
            group.update(course)

    def remotes(self) -> list[RemoteModule]:
        """Returns the remote modules in `modules`; all have the optimizer."""
        found = {each: None for module in self._modules for each in module.modules() if isinstance(each, RemoteModule)}
        new = [each for each in found if each not in self._told]
        options = taken_apart(self._options, grad=False)
        at_once(lambda each: each.link.ask(Optimize(self._key, self._kind), options), new)
        self._told.update(new)
        return list(found)

    def begins(self, phase: str, step: str) -> bool:
        """Returns whether this phase of a step has not begun here yet."""
        with self._guard:
            new = (phase, step) not in self._done
            if new:
                self._done.append((phase, step))
            return new

    def measure(self, gradients: Iterable[Tensor], context: str, step: str) -> float:
        """Returns the sum of squares of these gradients, and of a context's at owners below."""
        below = at_once(lambda each: _number(each, Measure(self._key, context, step)), self.remotes())
        return math.fsum([*(_square(gradient) for gradient in gradients), *below])

    def update(self, step: Callable[[], None], context: str, name: str, factor: float) -> None:
        """Has owners below update their parameters, and runs `step`, which updates those that are here."""
        record, course = Update(self._key, context, name, factor), taken_apart(self.course, grad=False)
        at_once(lambda each: each.link.ask(record, course), self.remotes())
        step()

    def drop(self, context: str) -> None:
        """Has owners below drop the gradients of a context."""
        at_once(lambda each: each.link.ask(Drop(context)), self.remotes())


def at_once(call: Callable[[Any], T], each: Sequence[Any]) -> list[T]:
    """Returns the results of calls in threads; raises the first error once all have ended."""
    if len(each) < 2:
        return [call(one) for one in each]
    with ThreadPoolExecutor(len(each), "shoal-remote") as threads:
        return [future.result() for future in [threads.submit(call, one) for one in each]]


def _number(remote: RemoteModule, record: Any) -> float:
    answer = remote.link.ask(record)
    return float(answer.structure)


def _square(gradient: Tensor) -> float:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    values = torch.view_as_real(values) if values.is_complex() else values
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2 if values.numel() else 0.0
