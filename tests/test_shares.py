"""How much of the model's state each rank has at most: counted by the engine, and weighed by the kernel (PSS, where a
page is split among those who map it).

stage     weights                            gradients                                          masters, optimizer state
1         in one memory 1/N, on hosts all    all                                                1/N
2         in one memory 1/N, on hosts all    1/N, whole ones while backward fills them: two,    1/N
3         1/N, on hosts whole ones in use:     and the tied one, which it fills twice           1/N
          two, and the tied one
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory import peak_pss
from benchmarks.processes import trim_memory
from shoal import Engine, Plan
from shoal.chunks.gradient_pool import GradientPool
from shoal.models import GPT, GPTConfig, causal_lm
from tests.pool import apart, disposable_ranks

MIB = 2**20
CONFIG = GPTConfig(4096, 16, 6, 512, 8, tied=True)
"""21.0M parameters in 19 chunks, that of the tied embedding the largest."""
NEXT_TO_NOTHING = GPTConfig(64, 16, 1, 16, 1, tied=True)
CHUNK = 4 * MIB
ALLOWED = 24 * MIB
"""Of PSS, beyond what a process alone takes for activations, autograd's own gradients and the heap: buffers of
sockets."""
PADDING = 1.01
Stage = tuple[int, bool]
"""plan.zero, and whether each rank is as if on a host of its own."""
STAGES: list[Stage] = [(1, False), (2, False), (2, True), (3, True)]

pytestmark = [pytest.mark.alone, pytest.mark.skipif(sys.platform != "linux", reason="PSS is Linux's")]


class Loans:
    """The most bytes of whole gradients that a GradientPool has lent at a time and somebody still holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = self.most = 0
        borrow = GradientPool.borrow
        monkeypatch.setattr(
            GradientPool, "borrow", lambda gradient_pool, turn, numel: self._lent(borrow(gradient_pool, turn, numel))
        )

    def _lent(self, flat: torch.Tensor) -> torch.Tensor:
        self._now += flat.nbytes
        self.most = max(self.most, self._now)
        weakref.finalize(flat, self._given_back, flat.nbytes)
        return flat

    def _given_back(self, nbytes: int) -> None:
        self._now -= nbytes


def train(world, stage: int, config: GPTConfig) -> dict[str, int]:
    """Bytes that a rank keeps by role, and of what passes the most at a time; elements of the tied chunk and of the
    largest of the others."""
    plan = Plan(dp=world.size, zero=stage, exchange={"name": "allreduce", "chunk_bytes": CHUNK})
    engine = Engine(
        partial(GPT, config), causal_lm, partial(torch.optim.AdamW, lr=1e-3), plan, global_batch=2 * world.size,
        microbatch=1, precision="bf16", world=world,
    )  # fmt: skip
    row = torch.arange(17) % config.vocab_size
    data = [{"input_ids": row[:-1], "labels": row[1:]}] * 64
    with pytest.MonkeyPatch.context() as monkeypatch:
        loans = Loans(monkeypatch)
        for batch in engine.batches(data, steps=2):
            assert torch.isfinite(torch.tensor(engine.step(batch).loss))
    owned = [chunk.owned for chunk in engine.parts.chunks]
    *others, tied = engine.parts.chunks
    assert "token_embedding.weight" in {slot.name for slot in tied.slots}
    kept = sum(chunk.nbytes for chunk in engine.parts.chunks)
    masters = sum(each.master.nbytes for each in owned)
    whole = sum(chunk.data.nbytes for chunk in engine.parts.chunks)  # without memory of its own where it passes
    weights = sum(each.data.nbytes for each in owned) if engine.parts.gather else whole
    found = {
        "weights": weights,
        "gradients": kept - masters - weights,
        "masters": masters,
        "optimizer state": sum(each.nbytes for each in engine.optimizer.state_tensors().values()),
        "in use": engine.parts.gather.executor.most if engine.parts.gather else 0,
        "on loan": loans.most,
        "tied": tied.size,
        "largest": max((chunk.size for chunk in others), default=0),
        "peak": peak_pss(),  # while all ranks have the memory that they share
    }
    world.everyone.barrier()
    engine.close()
    return found


def weigh(world, stages: Sequence[Stage]) -> list[dict[str, int]]:
    """Of each stage the counts, and by how much the peak of the process's PSS rose over what a model of next to nothing
    takes."""
    found, on_hosts = [], apart(world)
    for stage, hosts in stages:
        those = on_hosts if hosts else world
        train(those, stage, NEXT_TO_NOTHING)
        gc.collect()
        trim_memory()
        world.everyone.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
        before = peak_pss()
        counted = train(those, stage, CONFIG)
        found.append({**counted, "pss": counted["peak"] - before})
    return found


@cache
def of_ranks(number: int, *stages: Stage) -> dict[Stage, list[dict[str, Any]]]:
    """The findings of each rank by stage."""
    with disposable_ranks(weigh, number, stages) as ranks:
        found = [rank.result() for rank in ranks]
    return {stage: [each[place] for each in found] for place, stage in enumerate(stages)}


@pytest.mark.parametrize(("stage", "hosts"), STAGES)
@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_a_rank_has_its_share_and_what_passes(number, stage, hosts):
    (alone,) = of_ranks(1, (0, False))[0, False]
    common = stage == 3 or not hosts
    shares = {
        "weights": 1 / number if common else 1,
        "gradients": 1 if stage == 1 else 1 / number,
        "masters": 1 / number,
        "optimizer state": 1 / number,
    }
    for rank in of_ranks(number, *STAGES)[stage, hosts]:
        if not hosts:
            rank = {**rank, "weights": rank["weights"] // number}  # each has all of that memory in its books
        for role, share in shares.items():
            assert rank[role] <= PADDING * share * alone[role], role
        at_a_time = 2 * rank["largest"] + rank["tied"]
        assert rank["on loan"] <= (0 if stage == 1 else at_a_time * torch.float32.itemsize)
        assert rank["in use"] <= (at_a_time * torch.bfloat16.itemsize if hosts and stage == 3 else 0)
        most = sum(rank[role] for role in (*shares, "on loan", "in use"))
        beside = alone["pss"] - sum(alone[role] for role in shares)
        assert most / 2 < rank["pss"] <= most + beside + ALLOWED
