"""Question `replan`: what does it cost to change the plan of a run while it runs?

    python -m benchmarks.replan [--model 33m,124m] [--change ...] [--rounds 3] [--quick]

4 processes of one thread train a GPT with AdamW in fp32 for two steps, then go from one plan to another and back, in
turn with what they would do otherwise: save, start again as new processes, load. Bytes that ranks receive stand beside
the least possible, counted element by element (what a rank needs and does not hold); seconds of moving beside the
bound, which is bytes received over the rate of a message between all ranks at once, and bytes copied within a rank over
the rate of such a copy, both measured in this run. Writes results/replan.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import harness, workload
from benchmarks.processes import ProcessGroup, Step
from benchmarks.targets import Target, judge, print_targets
from benchmarks.workload import Tokens, sum_loss
from shoal import Engine, Plan
from shoal.checkpoint.handover import PURPOSE, Handover
from shoal.checkpoint.pieces import Piece, Want
from shoal.launch import join
from shoal.models import GPT
from shoal.models.presets import PRESETS

RANKS, STEPS, BATCH, SEQUENCE = 4, 2, 8, 64
MIB = 2**20
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp -> zero 3": ({"dp": 4}, {"dp": 4, "zero": 3}),
    "zero 3 -> tp x dp": ({"dp": 4, "zero": 3}, {"dp": 2, "tp": 2}),
    "dp -> pp": ({"dp": 4}, {"pp": 4}),
}
MODELS = ("33m", "124m")
TARGETS = [
    target
    for model in MODELS
    for change in CHANGES
    for target in (
        Target(f"{model} {change} bytes", f"{model}, {change}: bytes received over the least", 1.2, at_least=False),
        Target(f"{model} {change} moving", f"{model}, {change}: seconds of moving over the bound", 1.2, at_least=False),
        Target(f"{model} {change} restart", f"{model}, {change}: save, start, load over the change", 20.0),
    )
]
_engine: Engine | None = None
"""Of this process, a rank."""


class Watched:
    """Watches, inside the context, what handovers hold, want and take."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.wants: list[Want] = []
        self.seconds = 0.0

    def __enter__(self) -> Watched:
        self._before = Handover.__init__, Handover.load
        made, load = self._before

        def watched_init(source: Handover, group: Any, pieces: Sequence[Piece], *rest: Any) -> None:
            self.pieces = list(pieces)
            made(source, group, pieces, *rest)

        def watched_load(source: Handover, wants: Sequence[Want]) -> None:
            self.wants += wants
            began = time.perf_counter()
            load(source, wants)
            self.seconds += time.perf_counter() - began

        setattr(Handover, "__init__", watched_init)  # noqa: B010
        setattr(Handover, "load", watched_load)  # noqa: B010
        return self

    def __exit__(self, *_: object) -> None:
        Handover.__init__, Handover.load = self._before  # type: ignore[method-assign]

    def lacking(self) -> tuple[int, int]:
        """Bytes that this rank wants and does not hold, and those that it holds: counted element by element."""
        held: dict[str, torch.Tensor] = {}
        itemsize: dict[str, int] = {}
        for piece in self.pieces:
            mask = held.setdefault(piece.name, torch.zeros(piece.shape, dtype=torch.bool))
            mask[piece.box.slices] = True
            itemsize[piece.name] = piece.tensor.element_size()
        lacking = here = 0
        for want in self.wants:
            nothing = torch.zeros(want.shape, dtype=torch.bool)
            there = int(held.get(want.name, nothing)[want.box.slices].sum())
            size = itemsize.get(want.name, want.into.element_size())
            lacking, here = lacking + (want.box.numel - there) * size, here + there * size
        return lacking, here


def model() -> GPT:
    """The preset's model. A factory that sets no seed is recorded: no rank builds the whole of it."""
    return GPT(workload.MODEL)


def training(preset: str, plan: dict[str, Any], directory: str | None = None) -> Step:
    """A rank of a run under `plan`, which has trained STEPS steps, or is loaded from `directory`."""
    global _engine
    workload.MODEL = PRESETS[preset]
    optimizer = partial(torch.optim.AdamW, lr=workload.LEARNING_RATE, fused=True)
    _engine = Engine(model, sum_loss, optimizer, Plan(**plan), global_batch=BATCH, world=join())
    if directory is not None:
        _engine.load(directory)
        return lambda: None
    for batch in _engine.batches(Tokens(SEQUENCE), steps=STEPS):
        _engine.step(batch)
    return lambda: None


def change(plan: dict[str, Any]) -> dict[str, float]:
    """Changes the plan; the seconds and bytes of this rank."""
    assert _engine is not None
    everyone = _engine.world.everyone
    before = _engine.ledger.total(purpose=PURPOSE).wire
    everyone.barrier()
    with Watched() as watched:
        began = time.perf_counter()
        _engine.replan(Plan(**plan))
        everyone.barrier()
        seconds = time.perf_counter() - began
    sent = _engine.ledger.total(purpose=PURPOSE).wire - before
    least, here = watched.lacking()
    return {"seconds": seconds, "moving": watched.seconds, "sent": sent, "least": least, "here": here}


def rates() -> tuple[float, float]:
    """Bytes a second of a message from each rank to the next, all at once, and of a copy within each rank."""
    assert _engine is not None
    group = _engine.world.everyone
    out, into = (torch.ones(32 * MIB, dtype=torch.uint8) for _ in range(2))
    message, copy = [], []
    for _ in range(6):
        group.barrier()
        began = time.perf_counter()
        group.exchange(into, (group.rank - 1) % group.size, out, (group.rank + 1) % group.size)
        message.append(time.perf_counter() - began)
        group.barrier()
        began = time.perf_counter()
        into.copy_(out)
        copy.append(time.perf_counter() - began)
    return out.nbytes / statistics.median(message[1:]), out.nbytes / statistics.median(copy[1:])


def save(directory: str) -> float:
    """Saves a checkpoint; the seconds."""
    assert _engine is not None
    began = time.perf_counter()
    _engine.save(directory)
    return time.perf_counter() - began


def compared(model: str, name: str, rounds: int) -> dict[str, Any]:
    """One change of one model, and the restart in its place, in turn."""
    old, new = CHANGES[name]
    samples: list[dict[str, Any]] = []
    directory = tempfile.mkdtemp()
    try:
        with ProcessGroup(training, {"preset": model, "plan": old}, size=RANKS, warm_up=0) as group:
            for _ in range(rounds):
                per_rank = group.call(partial(change, new))
                message, copy = (min(each) for each in zip(*group.call(rates), strict=True))
                group.call(partial(change, old))
                saving = max(group.call(partial(save, directory)))
                began = time.perf_counter()
                again = {"preset": model, "plan": new, "directory": directory}
                with ProcessGroup(training, again, size=RANKS, warm_up=0):
                    loading = time.perf_counter() - began
                bound = max(each["least"] / message + each["here"] / copy for each in per_rank)
                samples.append(
                    {
                        "seconds": max(each["seconds"] for each in per_rank),
                        "moving": max(each["moving"] for each in per_rank),
                        "bytes": sum(each["sent"] for each in per_rank),
                        "least": sum(each["least"] for each in per_rank),
                        "within": sum(each["here"] for each in per_rank),
                        "bound": bound,
                        "save": saving,
                        "restart": loading,
                        "message_rate": message,
                        "copy_rate": copy,
                    }
                )
    finally:
        shutil.rmtree(directory)
    return {"model": model, "change": name, "ranks": RANKS, "samples": samples}


def figures(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The ratios that the targets judge: medians over rounds. Nothing to receive counts as 1 if nothing was."""
    found = {}
    for result in results:
        key, samples = f"{result['model']} {result['change']}", result["samples"]
        found[f"{key} bytes"] = statistics.median(
            each["bytes"] / each["least"] if each["least"] else 1.0 + each["bytes"] for each in samples
        )
        found[f"{key} moving"] = statistics.median(each["moving"] / each["bound"] for each in samples)
        found[f"{key} restart"] = statistics.median(
            (each["save"] + each["restart"]) / each["seconds"] for each in samples
        )
    return found


def print_table(results: Sequence[dict[str, Any]]) -> None:
    table = Table(title=f"{RANKS} ranks, medians of rounds", title_justify="left")
    columns = ("change", "MiB received", "least", "s moving", "bound", "s in all", "s save", "s start and load")
    for column in columns:
        table.add_column(column, justify="left" if column == "change" else "right")
    for result in results:
        of = {key: statistics.median(each[key] for each in result["samples"]) for key in result["samples"][0]}
        table.add_row(
            f"{result['model']} {result['change']}",
            *(f"{of[key] / MIB:.1f}" for key in ("bytes", "least")),
            *(f"{of[key]:.2f}" for key in ("moving", "bound", "seconds", "save", "restart")),
        )
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=harness.several(MODELS), default=list(MODELS))
    parser.add_argument("--change", type=harness.several(list(CHANGES)), default=list(CHANGES))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = harness.parse(parser, "one round of the small model", model=["33m"], rounds=1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = [compared(model, name, arguments.rounds) for model in arguments.model for name in arguments.change]
    print_table(results)
    judged = judge(TARGETS, figures(results))
    print_targets(judged)
    if not arguments.quick:
        print(harness.write_record("replan", vars(arguments), {"changes": results, "targets": judged}))


if __name__ == "__main__":
    main()
