"""What forwards in training mode change beside gradients, on which ranks agree at the end of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from shoal.module.batchnorm import RunningStatistics
from shoal.module.buffer_values import buffers_untouched
from shoal.module.buffers import OtherBuffers
from shoal.parallel.expert import ExpertCounts


class OfTheCaller(Protocol):
    """State of the caller's own, of which `begin` remembers what it is before a step."""

    def begin(self, step: int) -> None: ...


@dataclass(frozen=True)
class Effects:
    """BatchNorm's running statistics, all other buffers of `module`, and how many tokens each expert was given.

    - `routes_all_tokens`: routers see all tokens of a microbatch, and so do their losses, wherever the tokens are
    - `merges_statistics`: replicas merge running statistics at the end of a step; with SyncBN they have the same
      already
    """

    module: nn.Module
    statistics: RunningStatistics
    buffers: OtherBuffers
    experts: ExpertCounts
    routes_all_tokens: bool
    merges_statistics: bool
    of_the_caller: list[OfTheCaller] = field(default_factory=list)

    def begin(self, step: int) -> None:
        """Begins a step."""
        for each in self.of_the_caller:
            each.begin(step)
        self.statistics.begin()
        self.buffers.begin()
        self.experts.begin()

    def restore(self) -> None:
        """Puts back what forwards have changed since `begin`, for a step that was cut short."""
        self.statistics.restore()
        self.buffers.restore()

    def of(self, counts: bool) -> AbstractContextManager[None]:
        """Wraps a microbatch: one that does not count leaves nothing behind."""
        return nullcontext() if counts else self._none()

    @contextmanager
    def _none(self) -> Iterator[None]:
        with buffers_untouched(self.module), self.buffers.mute(), self.experts.mute():
            yield
