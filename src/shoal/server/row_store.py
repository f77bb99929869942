"""Rows under an optimizer that updates some of them at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.device import CPU
from shoal.optim.fused.optimizer import OptimizerFactory


class RowStore:
    """`values` [rows, width] and the state that an optimizer keeps for them.

    An update runs the optimizer over the rows that have gradients and over their state, as torch's lazy optimizers do.
    Its counters, such as Adam's step, are those of all rows.

    state: what the optimizer keeps for each number, by key, as [rows, width].
    """

    def __init__(self, values: Tensor, optimizer: OptimizerFactory) -> None:
        self.values = values
        self._touched = nn.Parameter(values.new_zeros(1, values.shape[1]))
        self.optimizer = optimizer([{"params": [self._touched]}])
        self.state: dict[str, Tensor] = {}
        for key, value in self._kept.items():
            if isinstance(value, Tensor) and value.shape == self._touched.shape:  # what the optimizer begins with
                self.state[key] = value[0, 0].expand_as(values).clone()

    def at(self, index: Tensor) -> Tensor:
        """Returns the values of the rows at `index` (int64 [n])."""
        return self.values.index_select(0, index.to(self.values.device))

    @torch.no_grad()
    def step(self, index: Tensor, gradients: Tensor) -> None:
        """Updates the rows at `index` (int64 [n], each once) with their gradients [n, width]."""
        touched, state, index = self._touched, self.optimizer.state[self._touched], index.to(self.values.device)
        touched.data, touched.grad = self.values.index_select(0, index), gradients
        state.update({key: values.index_select(0, index) for key, values in self.state.items()})
        self.optimizer.step()
        self.values[index] = touched.data
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == touched.shape:
                self.state.setdefault(key, torch.zeros_like(self.values))[index] = value
        touched.grad = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Values and state, by their names in a checkpoint."""
        return {"rows": self.values, **{f"optim.{key}": each for key, each in self.state.items()}}

    @property
    def counters(self) -> dict[str, Any]:
        """What the optimizer keeps of all rows together, by key."""
        return {key: value for key, value in self._kept.items() if key not in self.state}

    @property
    def counts_on(self) -> torch.device:
        """Where counters are that are tensors."""
        group = self.optimizer.param_groups[0]
        return self.values.device if group.get("fused") or group.get("capturable") else CPU

    def count_on(self, counters: Mapping[str, Any]) -> None:
        """Goes on with other counters."""
        self.optimizer.state[self._touched].update(counters)

    @property
    def _kept(self) -> Mapping[str, Any]:
        return self.optimizer.state.get(self._touched, {})
