"""What an engine is made of, for who looks inside it: reports, benchmarks, tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.assembly.memory import Memory
from shoal.assembly.model import Local
from shoal.assembly.trainer import Trainer
from shoal.checkpoint.buddy import Buddy
from shoal.chunks import Chunk, Gather, Tier
from shoal.chunks.gradient_pool import GradientPool
from shoal.chunks.versions import Versions
from shoal.comm import Link
from shoal.device import is_accelerator
from shoal.exchange import Algorithm
from shoal.exchange.rounds import Round
from shoal.mesh import Mesh
from shoal.module.recompute import Recompute
from shoal.optim.tiers.pager import Pager
from shoal.training.no_flush import NoFlushRunner
from shoal.training.step import StepRunner


@dataclass(frozen=True)
class Parts:
    """The parts at this moment; another version may have others. None: this engine needs none.

    `mesh`: which rank stands where.
    `chunks`: what parameters lie in, of about `chunk_bytes` each, chosen for `link` where that was measured.
    `gather`: how weights come and go that are not whole here; `recompute`: what backward computes again.
    `gradient_pool`: memory that gradients take in turn; `pager`: optimizer state that comes from host or disk.
    `tier`: what is on the device of `plan.memory`, `host`: what it has at home there.
    `exchange`: the algorithm of the plan's exchange; `runner`: what makes steps.
    `versions`: the weights that microbatches under way see, where the schedule has no flush.
    `buddy`: keeps state of another rank.
    `lag`: how many steps go by until the numbers of one can be read without waiting, for the device, or for the stages
    behind where the schedule has no flush. `rounds()`: those of the last step in which gradients were exchanged.
    """

    mesh: Mesh
    chunks: Sequence[Chunk]
    chunk_bytes: int
    link: Link | None
    gather: Gather | None
    recompute: Recompute | None
    gradient_pool: GradientPool | None
    pager: Pager | None
    tier: Tier | None
    host: Tier | None
    exchange: Algorithm
    runner: StepRunner | NoFlushRunner
    versions: Versions | None
    buddy: Buddy | None
    lag: int
    rounds: Callable[[], Sequence[Round]]


def parts_of(local: Local, memory: Memory, trainer: Trainer) -> Parts:
    """The parts of an engine, from the phases of its assembly."""
    ranks, offload, runner = local.ranks, memory.offload, trainer.runner
    on_device = int(is_accelerator(ranks.world.device))
    return Parts(
        mesh=ranks.mesh,
        chunks=memory.chunks,
        chunk_bytes=memory.chunk_bytes,
        link=memory.link,
        gather=memory.gather,
        recompute=local.recompute,
        gradient_pool=trainer.gradient_pool,
        pager=memory.pager,
        tier=None if offload is None else offload.tier,
        host=None if offload is None else offload.host,
        exchange=memory.exchange,
        runner=runner,
        versions=trainer.versions,
        buddy=trainer.buddy,
        lag=on_device if local.flushes else ranks.stages.size - 1,
        rounds=lambda: runner.rounds if isinstance(runner, StepRunner) else (),
    )
