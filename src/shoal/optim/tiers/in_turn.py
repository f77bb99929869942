"""Updates chunk by chunk, where the optimizer's side of all chunks is not in memory together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.optim.tiers.deferred_update import DeferredUpdate
from shoal.optim.tiers.pager import Pager

if TYPE_CHECKING:
    from shoal.optim.optimizer import ChunkOptimizer


@dataclass(frozen=True)
class InTurn:
    """What surrounds the updates of chunks one after the other.

    - `pager`: brings masters and state of chunks that have pages on a disk
    - `deferred`: runs the updates during the next forward, until somebody settles; None: they end within the step
    - `settled`: called with the optimizer when no update is under way
    """

    pager: Pager | None = None
    deferred: DeferredUpdate | None = None
    settled: Callable[[ChunkOptimizer], None] | None = None
