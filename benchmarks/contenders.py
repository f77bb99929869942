"""The contenders of `dp`: Shoal, the limit, the peers, and what the table says of each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import harness, peers
from benchmarks.processes import Build, ProcessGroup, Step
from benchmarks.workload import LEARNING_RATE, Case, Tokens, build_model, sum_loss

LIMIT = "no-communication"


@dataclass(frozen=True)
class Entry:
    """One contender: how to build it, in which precisions it runs, its note in the table."""

    build: Build
    note: str
    precisions: tuple[str, ...] = ("fp32", "bf16")


def run_entries(
    entries: Mapping[str, Entry],
    case: Case,
    precision: str,
    rounds: int,
    ranks: int,
    limit: str = LIMIT,
    **settings: Any,
) -> dict[str, Any]:
    """Starts `entries`, of `ranks` processes each, with `settings` for their builders beside case and precision, and
    times them in turn; prints the progress, returns a set of the record."""
    with ExitStack() as stack:
        groups = {}
        for name, entry in entries.items():
            print(f"{case.name} {precision}: starting {name}", flush=True)
            given = {"case": case, "precision": precision, **settings}
            groups[name] = stack.enter_context(ProcessGroup(entry.build, given, size=ranks))
        samples = harness.measure(groups, rounds, case.steps)
    notes = {name: entry.note for name, entry in entries.items()}
    return harness.result_of(samples, limit, notes, case=case.name, precision=precision, steps=case.steps)


def shoal(case: Case, precision: str, exchange: str = "allreduce", zero: int = 0, apart: bool = False) -> Step:
    """Shoal's engine, data parallel. bf16: weights in bf16, gradients and exchange in fp32, fp32 masters in the
    optimizer. `apart`: each rank as if on a host of its own, so that they share no memory."""
    from shoal import Engine, Plan
    from shoal.comm import Seat, World
    from shoal.launch import join

    ranks, world = int(os.environ["WORLD_SIZE"]), join()
    if apart:
        world = World(world.rank, world.size, store=world.store, seat=Seat(host_id=f"host {world.rank}"))
    engine = Engine(
        build_model,
        sum_loss,
        partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
        Plan(dp=ranks, exchange=exchange, zero=zero),
        global_batch=case.batch,
        microbatch=case.batch // ranks,
        precision=precision,
        world=world,
    )
    batches = engine.batches(Tokens(case.sequence))
    return lambda: engine.step(next(batches))


CONTENDERS: dict[str, Entry] = {
    LIMIT: Entry(
        partial(shoal, exchange="none"),
        "Shoal's engine, exchange removed: all ranks at once, same kernels and optimizer",
    ),
    "no-communication-by-hand": Entry(
        peers.none_by_hand, "a plain PyTorch loop, a check on the limit; it takes no norm of the gradient"
    ),
    "no-communication-by-hand-norm": Entry(
        partial(peers.none_by_hand, norm=True), "the same with the norm of each step's gradient, which must be finite"
    ),
    "shoal": Entry(shoal, "bf16: weights bf16, gradients and exchange fp32, fp32 masters"),
    "shoal-zero1": Entry(
        partial(shoal, zero=1), "the same, optimizer state and masters cut among the ranks (plan.zero = 1)"
    ),
    "ddp": Entry(peers.ddp, "torch DDP; bf16: autocast over fp32 weights, exchange fp32"),
    "ddp-pure-bf16": Entry(
        peers.ddp_pure, "torch DDP; weights, gradients, exchange, AdamW all bf16: LOWER PRECISION", ("bf16",)
    ),
    "fsdp2": Entry(peers.fsdp2, "torch FSDP2; bf16: parameters bf16, reduce fp32"),
    "accelerate": Entry(peers.accelerate, "Accelerate's prepare; bf16: autocast over fp32 weights"),
    "deepspeed-zero1": Entry(
        partial(peers.deepspeed_zero, stage=1),
        "DeepSpeed ZeRO-1; bf16: weights and exchange bf16, fp32 masters sharded",
    ),
}
ZERO: dict[int, dict[str, Entry]] = {
    stage: {
        LIMIT: CONTENDERS[LIMIT],
        "shoal": Entry(partial(shoal, zero=stage), f"plan.zero = {stage}; weights in one memory of the host"),
        "deepspeed": Entry(partial(peers.deepspeed_zero, stage=stage), f"DeepSpeed ZeRO-{stage}"),
    }
    for stage in (1, 2, 3)
}
"""By stage: those who shard as much."""
ZERO[1]["zero-redundancy"] = Entry(peers.zero_redundancy, "torch DDP with ZeroRedundancyOptimizer")
ZERO[3]["shoal-apart"] = Entry(
    partial(shoal, zero=3, apart=True), "the same without shared memory: over sockets, weights gathered and let go"
)
ZERO[3]["fsdp2"] = CONTENDERS["fsdp2"]
