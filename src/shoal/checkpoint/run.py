"""What there is to keep of a run: its position, what training changes, and the groups in which that is put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from shoal.checkpoint.buddy import Buddy
from shoal.checkpoint.given import Given
from shoal.chunks import Chunk
from shoal.chunks.versions import Versions
from shoal.comm import Group
from shoal.data import IterableSource
from shoal.exchange import Algorithm
from shoal.optim.optimizer import ChunkOptimizer
from shoal.optim.tiers.pager import Pager
from shoal.precision import LossScale


class Steps(Protocol):
    """Makes steps; `per_sample` is the expected number of counted units (tokens, say) of a sample, `unreported` the
    result of a step whose update is made and that the caller has not got yet, of a type that `wire` knows, or None."""

    per_sample: float

    @property
    def unreported(self) -> Any: ...

    def flush(self) -> None: ...
    def settle(self) -> None: ...
    def abandon(self) -> int | None: ...


@dataclass
class Progress:
    """The position of a run: the `step` that comes next, an iterable dataset (or its saved state) as `source`, the name
    of the `run`, and the result of the last step where no loop had got it when this engine took the run over."""

    step: int = 0
    source: IterableSource | dict[str, Any] | None = None
    run: str = ""
    made: Any = None


@dataclass(frozen=True)
class Members:
    """The groups over which this rank's part of the state is assembled.

    replicas: the data-parallel group
    parts: the ranks with other parts of this one's matrices
    stage: all ranks with this stage
    across: one rank of each stage; None without a pipeline
    everyone: all ranks
    experts: the ranks with the same experts; None if they are not spread
    expert_parts: the ranks with other experts, or other parts of this one's
    """

    replicas: Group
    parts: Group
    stage: Group
    across: Group | None
    everyone: Group
    experts: Group | None
    expert_parts: Group


@dataclass(frozen=True)
class State:
    """Everything that training changes, and a checkpoint saves; None for a part that the run does not have."""

    module: nn.Module
    chunks: Sequence[Chunk]
    optimizer: ChunkOptimizer
    exchange: Algorithm
    versions: Versions | None
    pager: Pager | None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    loss_scale: LossScale | None
    given: Given
    buddy: Buddy | None = None
