"""Question `cp`: rows of 8,192 tokens that two ranks share: what does a rank keep for backward, and what does sharing
cost?

    python -m benchmarks.cp [--tokens 8192] [--precision fp32,bf16] [--rounds 3] [--quick]

2 processes of one thread, the GPT of 33.7M parameters with 2 of its layers, one row a step. The limit is Shoal's engine
whose context-parallel groups send nothing (as in `tp`), with heads dealt out; the reference for memory is one process
with whole rows. Bytes kept for backward are counted by saved-tensor hooks, a storage once, parameters left out. torch's
own `context_parallel` has no kernels for CPUs; in its place stands what it does by default, by hand: each rank gathers
all keys and values. Writes results/cp.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import harness, workload
from benchmarks.contenders import LIMIT, Entry
from benchmarks.memory import MIB
from benchmarks.processes import ProcessGroup, Step
from benchmarks.targets import Target, judge, print_targets
from benchmarks.tp import AloneWorld
from benchmarks.workload import LEARNING_RATE, Case, Tokens, build_model
from shoal.parallel.context import Context

RANKS = 2
PRECISIONS = ("fp32", "bf16")
OURS = ("ulysses", "ring")
WHOLE, GATHERED = "one-process", "gathered"
TARGETS = [
    *(
        Target(f"{precision} {kind} kept", f"{precision}, {kind}: kept by a rank over that of whole rows", 0.55, False)
        for precision in PRECISIONS
        for kind in OURS
    ),
    *(
        Target(f"{precision} {kind} time", f"{precision}, {kind}: time with all keys gathered over ours", 1.0)
        for precision in PRECISIONS
        for kind in OURS
    ),
]
_kept = [0]
"""Bytes that backward kept in this process's last counted step."""


def row_loss(model: torch.nn.Module, microbatch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross entropy of a rank's tokens, which stand at `position_ids`."""
    labels = microbatch["labels"]
    logits = model(microbatch["input_ids"], position_ids=microbatch.get("position_ids")).float()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


class Gathering(Context):
    """Each rank gathers all keys and values, and its queries see those that they may."""

    def _by_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        return self._gathered(query, key, value, None, is_causal, scale)


def shoal(case: Case, precision: str, context: str = "ulysses", alone: bool = False, cp: int = RANKS) -> Step:
    """Shoal's engine with plan.cp over `cp` ranks; "gathered" in place of plan.context's."""
    import shoal.parallel.context.axis as axis
    from shoal import Engine, Plan
    from shoal.comm import Seat, World
    from shoal.launch import join

    workload.MODEL = replace(workload.PRESETS["33m"], sequence=case.sequence, layers=2)
    if context == GATHERED:
        vars(axis)["Context"] = Gathering
    world = join() if cp > 1 else World.single()
    if alone:
        world = Silenced(world.rank, world.size, seat=Seat(world.local_rank, world.local_size), store=world.store)
    engine = Engine(
        build_model,
        row_loss,
        partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
        Plan(cp=cp, context=context if context in OURS else "ulysses"),
        global_batch=case.batch,
        microbatch=case.batch,
        precision=precision,
        world=world,
    )
    batches = engine.batches(Tokens(case.sequence))
    own = {parameter.untyped_storage().data_ptr() for parameter in engine.parameters.values()}

    def step() -> None:
        seen = set(own)
        _kept[0] = 0

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                _kept[0] += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            engine.step(next(batches))

    return step


class Silenced(AloneWorld):
    """The same for context-parallel groups."""

    silent = ("cp",)


def kept() -> int:
    """Bytes that this process kept for backward in its last step."""
    return _kept[0]


CONTENDERS = {
    LIMIT: Entry(partial(shoal, alone=True), "Shoal's engine, nothing is sent between ranks of a row, heads dealt out"),
    "ulysses": Entry(shoal, 'plan.context = "ulysses": queries, keys, values and results change hands'),
    "ring": Entry(partial(shoal, context="ring"), 'plan.context = "ring": keys and values go round'),
    GATHERED: Entry(partial(shoal, context=GATHERED), "all keys and values on each rank, by hand"),
}


def run_set(case: Case, precision: str, rounds: int) -> dict[str, Any]:
    """One set of the record."""
    entries = {**CONTENDERS, WHOLE: Entry(partial(shoal, cp=1), "one process with whole rows, for memory")}
    with ExitStack() as stack:
        groups = {}
        for name, entry in entries.items():
            print(f"{case.name} {precision}: starting {name}", flush=True)
            size = 1 if name == WHOLE else RANKS
            groups[name] = stack.enter_context(
                ProcessGroup(entry.build, {"case": case, "precision": precision}, size=size, warm_up=1)
            )
        samples = harness.measure(groups, rounds, case.steps)
        bytes_kept = {name: max(group.call(kept)) for name, group in groups.items()}
    notes = {name: entry.note for name, entry in entries.items()}
    result = harness.result_of(samples, LIMIT, notes, case=case.name, precision=precision, steps=case.steps)
    for name, each in bytes_kept.items():
        result["contenders"][name]["kept"] = each
    return result


def figures(results: list[dict[str, Any]]) -> dict[str, float]:
    """What TARGETS name."""
    found = {}
    for result in results:
        rows, precision = result["contenders"], result["precision"]
        for kind in OURS:
            found[f"{precision} {kind} kept"] = rows[kind]["kept"] / rows[WHOLE]["kept"]
            found[f"{precision} {kind} time"] = harness.times_over(rows, GATHERED, kind)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--precision", type=harness.several(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = harness.parse(parser, "one round of rows of 512 tokens", rounds=1, tokens=512)
    case = Case(f"1x{arguments.tokens}", sequence=arguments.tokens, batch=1, steps=1)
    results = [run_set(case, precision, arguments.rounds) for precision in arguments.precision]
    for result in results:
        harness.print_table(result)
        for name, row in result["contenders"].items():
            print(f"{result['precision']} {name}: {row['kept'] / MIB:.0f} MiB kept for backward by a rank")
    judged = judge(TARGETS, figures(results))
    print_targets(judged)
    print(f"record: {harness.write_record('cp', vars(arguments), {'sets': results, 'targets': judged})}")


if __name__ == "__main__":
    main()
