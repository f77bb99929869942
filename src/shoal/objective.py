"""The loss of a global batch as a pure function of the parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm import Group
from shoal.comm.functional import copy_to, reduce_from
from shoal.data import Batch
from shoal.random import Randomness, keyed_functional
from shoal.step import Loss, StepRunner, call_loss


class Objective:
    """Called with all parameters by name it gives the mean loss of `batch` (0-dim), the same on every rank of `group`.

    `randomness`: where dropout is keyed. `everyone`: the ranks among whom the gradients of all parameters but those in `alone` are summed.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        runner: StepRunner,
        batch: Batch,
        randomness: Randomness | None,
        group: Group,
        everyone: Group,
        alone: Collection[str],
    ) -> None:
        self._module, self._loss, self._runner, self._batch = module, loss, runner, batch
        self._randomness, self._group, self._everyone, self._alone = randomness, group, everyone, alone

    def __call__(self, parameters: Mapping[str, Tensor]) -> Tensor:
        groups = {name: self._group if name in self._alone else self._everyone for name in parameters}
        module = _Functional(self._module, {name: copy_to(value, groups[name]) for name, value in parameters.items()})
        total = count = torch.zeros((), device=next(iter(parameters.values())).device)
        mine = self._runner.cut(self._batch.ids)[0]
        with self._runner.rows():
            # A rank without a microbatch runs one with weight 0: its collectives are the others'.
            for ids in mine or [self._batch.ids[:1]]:
                if self._randomness is not None:
                    self._randomness.begin(self._batch.step, ids)
                with nullcontext() if self._randomness is None else keyed_functional(self._randomness):
                    sums = call_loss(self._loss, module, self._runner.load(self._batch, ids))  # type: ignore[arg-type]
                weight = float(bool(mine))
                total, count = total + weight * sums.total, count + weight * sums.count
        return reduce_from(total, self._group) / reduce_from(count.to(total.dtype), self._group)


class _Functional:
    """The module as a function of `parameters`, called like the module."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        self._module, self._parameters = module, dict(parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self._module, self._parameters, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
