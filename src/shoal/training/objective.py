"""The loss of a global batch as a pure function of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm import Group
from shoal.comm.functional import copy_to, reduce_from
from shoal.data import Batch
from shoal.module.random import Randomness, keyed_functional
from shoal.training.loss import Loss, call_loss
from shoal.training.step import StepRunner, with_idle


class Objective:
    """Called with all parameters by name it gives the mean loss of `batch` (0-dim), the same on every rank of `group`.

    `randomness`: where dropout is keyed. `groups[name]`: the ranks among whom the gradient of a parameter is summed. `alike`: all ranks run as many forwards, since they meet in
    them.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        runner: StepRunner,
        batch: Batch,
        randomness: Randomness | None,
        group: Group,
        groups: Mapping[str, Group],
        alike: bool,
    ) -> None:
        self._module, self._loss, self._runner, self._batch = module, loss, runner, batch
        self._randomness, self._group, self._groups, self._alike = randomness, group, groups, alike

    def __call__(self, parameters: Mapping[str, Tensor]) -> Tensor:
        module = _Functional(self._module, {name: copy_to(value, self._groups[name]) for name, value in parameters.items()})
        total = count = torch.zeros((), device=next(iter(parameters.values())).device)
        mine, _, most, _ = self._runner.cut(self._batch.ids)
        with self._runner.rows():  # a rank without a microbatch runs one that does not count: its collectives are the others'
            for ids, counts in with_idle(mine, most if self._alike else 1, self._batch.ids[:1]):
                if self._randomness is not None:
                    self._randomness.begin(self._batch.step, ids)
                with nullcontext() if self._randomness is None else keyed_functional(self._randomness):
                    sums = call_loss(self._loss, module, self._runner.load(self._batch, ids))  # type: ignore[arg-type]
                weight = float(counts)
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
