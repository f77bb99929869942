"""Buffers of a client's model between a pull and a push: BatchNorm's statistics, which servers keep, and others, which
they do not know."""

from __future__ import annotations

import warnings

from torch import Tensor, nn

from shoal.module.batchnorm import RunningStatistics, other_buffers


class Buffers:
    """Follows the model that has pulled last."""

    def __init__(self) -> None:
        self._following: tuple[nn.Module, RunningStatistics] | None = None
        self._watched: nn.Module | None = None
        self._others: dict[str, tuple[Tensor, int]] = {}
        self._is_told = False

    def pulled(self, model: nn.Module, statistics: Tensor | None) -> None:
        """Gives `model` the servers' statistics, if they have any, and begins to watch its buffers."""
        if statistics is not None:
            self._following = model, RunningStatistics(model)
            self._following[1].put(statistics)
            self._following[1].begin()
        if not self._is_told:
            self._watched = model
            self._others = {name: (each, each._version) for name, each in other_buffers(model).items()}

    def term(self, model: nn.Module) -> Tensor | None:
        """What the forwards of `model` since then have added to statistics, fp64 on the CPU; None where it has not
        pulled any. Warns, once, of another buffer that they have changed."""
        self._tell(model)
        if self._following is None or self._following[0] is not model:
            return None
        term = self._following[1].term().cpu()
        self._following[1].begin()
        return term

    def _tell(self, model: nn.Module) -> None:
        now = {} if self._is_told or self._watched is not model or not self._others else other_buffers(model)
        for name in now.keys() & self._others.keys():
            before, version = self._others[name]
            if now[name] is not before or before._version != version:
                self._is_told = True
                warnings.warn(
                    f"the model's forward changes the buffer {name}, which servers have as it was in the beginning: "
                    "they keep such only of BatchNorm. Save it with the clients, or take a model without it",
                    stacklevel=4,
                )
                return
