"""Question `moe`: what do experts on different ranks cost, with Shoal and with DeepSpeed-MoE?

    python -m benchmarks.moe [--case top2-8x256,top1-8x256,top2-2x64] [--precision fp32,bf16] [--rounds 4] [--quick]

2 processes of one thread train a GPT of 8 blocks, every second of which has 8 experts in place of its MLP, 4 on each
rank: 92M parameters. A rank has half of the rows, its tokens travel to their experts. All drop what is beyond the same
capacity, by position, and add the same balance loss. The limit is Shoal's engine of which nothing is sent: each rank
computes its own tokens twice over, as many as would come. Times in turn as in `dp`. Writes results/moe.json.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks import harness, peers, workload
from benchmarks.contenders import LIMIT, Entry, run_entries
from benchmarks.processes import Step
from benchmarks.targets import Target, judge, print_targets
from benchmarks.tp import AloneWorld
from benchmarks.workload import LEARNING_RATE, Case, Tokens
from shoal.models.moe import MoEConfig
from shoal.models.presets import PRESETS

RANKS, EXPERTS, CAPACITY = 2, 8, 1.25
CASES = {
    "top2-8x256": (Case("top2-8x256", sequence=256, batch=8, steps=3), 2),
    "top1-8x256": (Case("top1-8x256", sequence=256, batch=8, steps=3), 1),
    "top2-2x64": (Case("top2-2x64", sequence=64, batch=2, steps=6), 2),
}
PRECISIONS = ("fp32", "bf16")
PEERS = ("deepspeed", "deepspeed-all")
TARGETS = [
    Target(f"{case} {precision} deepspeed", f"{case}, {precision}: DeepSpeed's time over ours", 1.0)
    for case in CASES
    for precision in PRECISIONS
]


class AloneInAll(AloneWorld):
    silent = ("dp", "ep", "edp")


def _set_model(per_token: int) -> None:
    moe = MoEConfig(EXPERTS, per_token, capacity_factor=CAPACITY, every=2)
    workload.MODEL = replace(PRESETS["33m"], moe=moe)


def shoal(case: Case, precision: str, per_token: int, alone: bool = False, drop: bool = True) -> Step:
    """Shoal's engine with plan.ep over all ranks. bf16: weights in bf16, fp32 masters in the optimizer."""
    from shoal import Engine, Plan
    from shoal.comm import Seat
    from shoal.launch import join
    from shoal.models import causal_lm

    _set_model(per_token)
    if not drop:
        assert workload.MODEL.moe is not None
        workload.MODEL = replace(workload.MODEL, moe=replace(workload.MODEL.moe, capacity_factor=None))
    world = join()
    if alone:
        world = AloneInAll(world.rank, world.size, seat=Seat(world.local_rank, world.local_size), store=world.store)
    engine = Engine(
        workload.build_model,
        causal_lm,
        partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
        Plan(dp=world.size, ep=world.size),
        global_batch=case.batch,
        microbatch=case.batch // world.size,
        precision=precision,
        world=world,
    )
    batches = engine.batches(Tokens(case.sequence))
    return lambda: engine.step(next(batches))


def deepspeed(case: Case, precision: str, per_token: int, drop: bool = True) -> Step:
    _set_model(per_token)
    return peers.deepspeed_moe(case, precision, drop)


CONTENDERS = {
    LIMIT: Entry(
        partial(shoal, alone=True), "Shoal's engine, nothing is sent: all ranks at once, same kernels and optimizer"
    ),
    "shoal": Entry(shoal, f"capacity {CAPACITY}; bf16: weights bf16, fp32 masters"),
    "shoal-all": Entry(partial(shoal, drop=False), "the same, nothing is dropped"),
    "deepspeed": Entry(deepspeed, f"DeepSpeed-MoE over gloo, capacity {CAPACITY}, ZeRO stage 0; bf16: its bf16 mode"),
    "deepspeed-all": Entry(
        partial(deepspeed, drop=False), "the same, nothing is dropped: padded to the busiest expert"
    ),
}


def run_set(case: Case, per_token: int, precision: str, rounds: int) -> dict[str, Any]:
    """One set of the record."""
    return run_entries(CONTENDERS, case, precision, rounds, RANKS, per_token=per_token)


def figures(results: list[dict[str, Any]]) -> dict[str, float]:
    """What TARGETS name: each of ours against DeepSpeed's of the same kind, the lesser of both."""
    found = {}
    for result in results:
        pairs = (("deepspeed", "shoal"), ("deepspeed-all", "shoal-all"))
        ratios = [harness.times_over(result["contenders"], *pair) for pair in pairs]
        found[f"{result['case']} {result['precision']} deepspeed"] = min(ratios)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=harness.several(list(CASES)), default=list(CASES))
    parser.add_argument("--precision", type=harness.several(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--rounds", type=int, default=4)
    arguments = harness.parse(parser, "one round of one step", rounds=1)
    results = []
    for name, precision in itertools.product(arguments.case, arguments.precision):
        case, per_token = CASES[name]
        results.append(
            run_set(replace(case, steps=1) if arguments.quick else case, per_token, precision, arguments.rounds)
        )
    for result in results:
        harness.print_table(result)
    judged = judge(TARGETS, figures(results))
    print_targets(judged)
    print(f"record: {harness.write_record('moe', vars(arguments), {'sets': results, 'targets': judged})}")


if __name__ == "__main__":
    main()
