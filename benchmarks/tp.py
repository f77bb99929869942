"""Question `tp`: what does tensor parallel cost, with Shoal and with torch's own?

    python -m benchmarks.tp [--case 8x256,2x64,8x256-2gbit] [--precision fp32,bf16] [--rounds 5] [--quick]

2 processes of one thread share the GPT of 33.7M parameters and see the same rows of tokens. The limit is Shoal's engine
whose tensor-parallel groups send
nothing: all ranks at once, the same kernels and optimizer; a gather then copies the rank's own part into every place,
    since memory that nobody wrote
would hold numbers that slow the products down. Behind links of 2 Gbit/s, which are emulated by sleeping as long as one
would be busy, stands ours alone: the collectives, and products that go on while tokens travel. Times in turn as in
`dp`. Writes results/tp.json, with --case 8x256-2gbit alone results/overlap.json.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, peers
from benchmarks.contenders import LIMIT, Entry, run_entries
from benchmarks.processes import Step
from benchmarks.targets import Target, judge, print_targets
from benchmarks.workload import LEARNING_RATE, Case, Tokens, build_model, sum_loss
from shoal.comm import Group, World
from shoal.comm.emulate import Throttled
from shoal.comm.silent import Silent

RANKS = 2
CASES = {
    "8x256": Case("8x256", sequence=256, batch=8, steps=3),
    "2x64": Case("2x64", sequence=64, batch=2, steps=12),
    "8x256-2gbit": Case("8x256-2gbit", sequence=256, batch=8, steps=3),
}
LINKS = {"8x256-2gbit": 2e9}
"""Bits a second of the cases that stand behind one."""
PRECISIONS = ("fp32", "bf16")
TARGETS = [
    *(
        Target(f"8x256 {precision} limit", f"8 x 256, {precision}: share of the no-communication limit", 0.92)
        for precision in PRECISIONS
    ),
    *(
        Target(f"8x256 {precision} torch", f"8 x 256, {precision}: torch's time over ours", 1.0)
        for precision in PRECISIONS
    ),
    *(
        Target(f"2x64 {precision} torch", f"2 x 64, {precision}: torch's time over ours", 1.25)
        for precision in PRECISIONS
    ),
]
OVERLAP = [
    Target(
        f"8x256-2gbit {precision} overlap",
        f"behind 2 Gbit/s, {precision}: time of the collectives over that of the ring",
        1.0,
    )
    for precision in PRECISIONS
]


class Alone(Silent):
    """Sends nothing, and takes what it has for what others would have sent."""

    def all_gather(self, out: Tensor, flat: Tensor) -> None:
        out.view(self.size, -1).copy_(flat)

    def reduce_scatter(self, out: Tensor, flat: Tensor, op: str) -> None:
        out.copy_(flat.view(self.size, -1)[self.rank])

    def all_to_all(self, out: Tensor, flat: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> None:
        out.copy_(flat)


class AloneGroup(Group):
    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        return value


class AloneWorld(World):
    """A world whose groups of names that begin with one of `silent` are of one each, which thinks that it is
    several."""

    silent: tuple[str, ...] = ("tp",)

    def group(self, name: str, ranks: list[int]) -> Group:
        if not name.startswith(self.silent):
            return super().group(name, ranks)
        return AloneGroup(name, ranks, self.ledger, {"cpu": Alone(ranks.index(self.rank), len(ranks))})


class SlowWorld(World):
    """A world whose tensor-parallel groups stand behind links of `bits` a second."""

    bits = 0.0

    def group(self, name: str, ranks: list[int]) -> Group:
        group = super().group(name, ranks)
        if name != "tp" or isinstance(group.transports["cpu"], Throttled):
            return group
        group.transports = {kind: Throttled(transport, self.bits) for kind, transport in group.transports.items()}
        return group


def shoal(case: Case, precision: str, alone: bool = False, between: str = "sequence") -> Step:
    """Shoal's engine with plan.tp over all ranks. bf16: weights in bf16, fp32 masters in the optimizer."""
    from shoal import Engine, Plan
    from shoal.launch import join

    world = join()
    who: dict[str, Any] = {"local_rank": world.local_rank, "local_size": world.local_size, "store": world.store}
    if alone:
        world = AloneWorld(world.rank, world.size, **who)
    elif case.name in LINKS:
        world = SlowWorld(world.rank, world.size, **who)
        world.bits = LINKS[case.name]
    engine = Engine(
        build_model,
        sum_loss,
        partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
        Plan(tp=world.size),
        global_batch=case.batch,
        microbatch=case.batch,
        precision=precision,
        tensor_rules={"": between},
        world=world,
    )
    batches = engine.batches(Tokens(case.sequence))
    return lambda: engine.step(next(batches))


CONTENDERS = {
    LIMIT: Entry(
        partial(shoal, alone=True), "Shoal's engine, nothing is sent: all ranks at once, same kernels and optimizer"
    ),
    "shoal": Entry(shoal, "bf16: weights bf16, fp32 masters; sequence parallel between the layers"),
    "shoal-all-tokens": Entry(
        partial(shoal, between="whole"), 'the same without sequence parallel (tensor_rules={"": "whole"})'
    ),
    "shoal-overlap": Entry(
        partial(shoal, between="overlap"), 'tokens are multiplied while others travel (tensor_rules={"": "overlap"})'
    ),
    "torch": Entry(peers.tensor_parallel, "torch parallelize_module over gloo; bf16: autocast over fp32 weights"),
    "torch-sequence": Entry(partial(peers.tensor_parallel, sequence=True), "the same with SequenceParallel"),
    "torch-pure-bf16": Entry(
        partial(peers.tensor_parallel, pure=True),
        "torch; weights, gradients, AdamW all bf16: LOWER PRECISION",
        ("bf16",),
    ),
}


def run_set(case: Case, precision: str, rounds: int) -> dict[str, Any]:
    """One set of the record."""
    entries = {name: entry for name, entry in CONTENDERS.items() if precision in entry.precisions}
    if case.name in LINKS:
        entries = {name: entry for name, entry in entries.items() if not name.startswith("torch")}
    else:
        del entries["shoal-overlap"]
    return run_entries(entries, case, precision, rounds, RANKS)


def figures(results: list[dict[str, Any]]) -> dict[str, float]:
    """What TARGETS name: ours against the fastest that torch does in the same precision."""
    found = {}
    for result in results:
        rows, key = result["contenders"], f"{result['case']} {result['precision']}"
        found[f"{key} limit"] = rows["shoal"]["share"]
        if result["case"] in LINKS:
            found[f"{key} overlap"] = harness.times_over(rows, "shoal", "shoal-overlap")
        else:
            found[f"{key} torch"] = min(harness.times_over(rows, peer, "shoal") for peer in ("torch", "torch-sequence"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=harness.several(list(CASES)), default=list(CASES))
    parser.add_argument("--precision", type=harness.several(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = harness.parse(parser, "one round of one step", rounds=1)
    cases = [replace(CASES[name], steps=1) if arguments.quick else CASES[name] for name in arguments.case]
    results = [
        run_set(case, precision, arguments.rounds) for case, precision in itertools.product(cases, arguments.precision)
    ]
    for result in results:
        harness.print_table(result)
    alone = set(arguments.case) <= set(LINKS)
    judged = judge(OVERLAP if alone else TARGETS + OVERLAP, figures(results))
    print_targets(judged)
    name = "overlap" if alone else "tp"
    print(f"record: {harness.write_record(name, vars(arguments), {'sets': results, 'targets': judged})}")


if __name__ == "__main__":
    main()
