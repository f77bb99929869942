"""An optimizer over parameters of several processes: each owner steps its own."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.errors import TrainingError, UserError
from shoal.optim.lr import Schedule, check_scheduler
from shoal.optim.named import OPTIMIZERS
from shoal.server.remote import contexts
from shoal.server.remote.contexts import Context
from shoal.server.remote.stepper import Stepper


class DistributedOptimizer:
    """Updates the parameters of `modules`: those of remote modules at their owners, by the gradients of a context,
    those that are here by `.grad`. Each owner has an optimizer, and its state, of its own.

    optimizer: a name such as "adamw", a class of torch.optim, or a `partial` of one.
    modules: a module, or several; what is remote may stand anywhere in them, and in remote ones.
    clip: the most that the norm of the gradient of all parameters, here and at all owners, may be; None: no limit.
    schedule: of the learning rate, as in `shoal.Engine`.
    options: of the optimizer, such as `lr`.

    Raises UserError for an optimizer or options that are none, and for modules without parameters.
    """

    def __init__(
        self,
        optimizer: str | type[torch.optim.Optimizer] | partial[torch.optim.Optimizer],
        modules: nn.Module | Iterable[nn.Module],
        *,
        clip: float | None = None,
        schedule: Schedule | None = None,
        **options: Any,
    ) -> None:
        chosen: Any = optimizer
        if isinstance(optimizer, partial):
            chosen, options = optimizer.func, {**optimizer.keywords, **options}
        kind = chosen if isinstance(chosen, str) else getattr(chosen, "__name__", repr(chosen)).lower()
        if not isinstance(chosen, str) and OPTIMIZERS.get(kind, chosen) is not chosen:
            raise UserError(
                f'DistributedOptimizer: {chosen!r} is not what owners have by the name "{kind}": give '
                f"torch.optim.{OPTIMIZERS[kind].__name__}, or step that one's parameters in their own process"
            )
        if clip is not None and not clip > 0:
            raise UserError(f"DistributedOptimizer: clip = {clip} is not above 0; None does not clip")
        self._modules = [modules] if isinstance(modules, nn.Module) else list(modules)
        if not self._modules:
            raise UserError("DistributedOptimizer: there are no modules: give those whose parameters it is to update")
        if wrong := [each for each in self._modules if not isinstance(each, nn.Module)]:
            raise UserError(
                f"DistributedOptimizer: a {type(wrong[0]).__name__} is no module: give modules, not their parameters"
            )
        try:
            self._stepper = Stepper(secrets.token_hex(8), kind, options, self._modules)
        except (TypeError, ValueError) as error:
            raise UserError(f"DistributedOptimizer: {kind} with {options}: {error}") from error
        self._clip = clip
        self._scheduler = schedule(self._stepper.optimizer) if schedule else None
        if self._scheduler is not None:
            check_scheduler(self._scheduler)
        if not self._stepper.remotes() and not self._stepper.parameters:
            raise UserError("DistributedOptimizer: there is nothing to update: the modules have no parameters")

    @property
    def lr(self) -> float:
        """The learning rate of the next step, at all owners."""
        return float(self._stepper.course["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        self._stepper.follow({"lr": value})

    def step(self, context: Context | None = None) -> float:
        """Updates all parameters by the gradients of a context, None for this thread's; returns the norm of the
        gradient before it is clipped.

        Owners are asked for their part of the norm first: where one cannot be reached, or the norm is not finite
        (TrainingError), nobody has stepped. An owner that is lost between the two leaves the others a step ahead.
        """
        name, step = (context or contexts.current()).name, secrets.token_hex(8)
        here = dict.fromkeys(self._stepper.parameters.values())
        gradients = [parameter.grad for parameter in here if parameter.grad is not None]
        norm = math.sqrt(self._stepper.measure(gradients, name, step))
        if not math.isfinite(norm):
            raise TrainingError(f"DistributedOptimizer.step: the norm of the gradient is {norm}: nothing was updated")
        factor = 1.0 if self._clip is None else min(1.0, self._clip / (norm + 1e-6))

        def update() -> None:
            if factor < 1.0:
                for gradient in gradients:
                    gradient.mul_(factor)
            self._stepper.optimizer.step()

        self._stepper.update(update, name, step, factor)
        if self._scheduler is not None:
            self._scheduler.step()
        return norm

    def zero_grad(self, context: Context | None = None) -> None:
        """Drops the gradients of a context, None for this thread's, at all owners, and those that are here."""
        self._stepper.optimizer.zero_grad()
        self._stepper.drop((context or contexts.current()).name)
