"""What an engine is made of, for who looks inside it: reports, benchmarks, tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.chunks import Chunk, Passing, Tier
from shoal.chunks.gradient_pool import Lender
from shoal.comm import Link
from shoal.data import Batch
from shoal.mesh import Mesh
from shoal.module.recompute import Recompute
from shoal.optim.tiers.pager import Pager


@dataclass(frozen=True)
class Parts:
    """The parts at this moment; another version may have others.

    `mesh`: which rank stands where. `chunks`: what parameters lie in, of about `chunk_bytes` each, chosen for `link` where that was measured.
    `passing`: how weights come and go that are not whole here; `recompute`: what backward computes again; `lender`: memory that gradients take in turn; `pager`: optimizer state that comes
    from host or disk. `tier`: what is on the device of `plan.memory`, `host`: what it has at home there. None: this engine needs none.
    `lag`: how many steps go by until the numbers of one can be read without waiting, for the device, or for the stages behind where the schedule has no
    flush. `rounds(batch)`: the most microbatches that a rank has of it.
    """

    mesh: Mesh
    chunks: Sequence[Chunk]
    chunk_bytes: int
    link: Link | None
    passing: Passing | None
    recompute: Recompute | None
    lender: Lender | None
    pager: Pager | None
    tier: Tier | None
    host: Tier | None
    lag: int
    rounds: Callable[[Batch], int]
