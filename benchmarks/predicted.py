"""Question `predicted`: does a rank take the memory that a rehearsal says, under each kind of plan?

    python -m benchmarks.predicted [--steps 6] [--plans dp zero3 ..] [--precisions fp32 bf16]

Runs Shoal on 2 ranks under one plan after the other, alone, and compares the highest PSS of each rank in steady steps
with the most bytes of tensors by `planner.rehearsal` plus a baseline: the same rank in steps of a model of next to
nothing under the same plan. Of weights that ranks have in common, as under ZeRO on the cores of one host, PSS counts a
share to each rank. Target: within 5%. What was run replaces its rows of the record, results/predicted.json; the others
stay.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import harness, workload
from benchmarks.memory import MIB, NEXT_TO_NOTHING, peak_pss
from benchmarks.processes import ProcessGroup, Step
from benchmarks.workload import CASES, LEARNING_RATE, Tokens, build_model, sum_loss
from shoal import Engine, Plan
from shoal.assembly.recipe import Recipe
from shoal.comm import Link
from shoal.planner.rehearsal import rehearse
from shoal.precision import precision as precision_named

RANKS = 2
TARGET = 0.05
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2},
    "zero3": {"dp": 2, "zero": 3},
    "recompute": {"dp": 2, "recompute": "full"},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
    "activations": {"dp": 2, "memory": {"activations": 1.0}},
    "deferred": {"dp": 2, "zero": 1, "memory": {"update": "deferred"}},
    "disk": {"dp": 2, "memory": {"disk": "~/.cache/shoal/predicted"}},
}
CASE = CASES["compute"]
DEFAULTS = {name: each.default for name, each in inspect.signature(Engine.__init__).parameters.items()}
_running: list[Engine] = []


def recipe(precision: str) -> dict[str, Any]:
    """What `Engine` and a rehearsal are given beside the model and the plan."""
    return {
        "optimizer": partial(torch.optim.AdamW, lr=LEARNING_RATE),
        "global_batch": CASE.batch,
        "microbatch": CASE.batch // RANKS,
        "precision": precision,
    }


def build(plan: Mapping[str, Any], precision: str, small: bool) -> Step:
    """A rank of the engine; `small`: with next to no model."""
    from shoal.launch import join

    if small:
        workload.MODEL = replace(NEXT_TO_NOTHING, layers=2, heads=2)
    engine = Engine(build_model, sum_loss, plan=Plan(**plan), world=join(), **recipe(precision))
    _running.append(engine)
    batches = engine.batches(Tokens(CASE.sequence))
    return lambda: engine.step(next(batches))


def begin_anew() -> Link | None:
    """Sets the highest RSS of this process to what it is now; returns the link that the engine measured."""
    Path("/proc/self/clear_refs").write_text("5")
    return _running[0].parts.link


def peaks_of(plan: Mapping[str, Any], precision: str, small: bool, steps: int) -> tuple[list[int], Link | None]:
    """The highest PSS of each rank in steady steps, in bytes."""
    with ProcessGroup(build, {"plan": plan, "precision": precision, "small": small}, size=RANKS) as group:
        link = group.call(begin_anew)[0]
        group.turn(steps)
        return group.call(peak_pss), link


def lent(plan: Mapping[str, Any], precision: str) -> int:
    """Bytes of the weights that PSS counts to other ranks, which have them in common with this one: those that are not
    at home elsewhere."""
    if not plan.get("zero") or "memory" in plan:
        return 0
    with torch.device("meta"):
        numel = sum(each.numel() for each in build_model().parameters())
    return numel * precision_named(precision).model.itemsize * (RANKS - 1) // RANKS


def row(name: str, precision: str, steps: int) -> dict[str, Any]:
    """One line of the record: of the rank of which the peak is farthest from the prediction."""
    plan, others = PLANS[name], lent(PLANS[name], precision)
    floors, _ = peaks_of(plan, precision, True, steps)
    peaks, link = peaks_of(plan, precision, False, steps)
    taken = Recipe.taken_from({**DEFAULTS, "loss": sum_loss, **recipe(precision)})
    ranks = []
    for rank, (floor, peak) in enumerate(zip(floors, peaks, strict=True)):
        step = rehearse(build_model, taken, Plan(**plan), Tokens(CASE.sequence), rank, link=link)[-1]
        predicted = step.most - others + floor
        ranks.append(
            {
                "held": step.held,
                "most": step.most,
                "of_others": others,
                "baseline": floor,
                "predicted": predicted,
                "measured": peak,
                "excess": peak / predicted - 1,
            }
        )
    return {"plan": name, "precision": precision, **max(ranks, key=lambda each: abs(each["excess"]))}


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Prints MiB of the rank farthest off, one line a plan and precision."""
    table = Table(title=f"Peak PSS of a rank in MiB (target: within {TARGET:.0%} of predicted)", title_justify="left")
    for column in ("plan", "precision", "tensors", "baseline", "predicted", "measured", "measured - predicted"):
        table.add_column(column, justify="left" if column in ("plan", "precision") else "right")
    for line in rows:
        amounts = line["most"] - line["of_others"], line["baseline"], line["predicted"], line["measured"]
        table.add_row(
            line["plan"], line["precision"], *(f"{each / MIB:.0f}" for each in amounts), f"{line['excess']:+.1%}"
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predicted", description="Peak PSS of a rank against its rehearsal."
    )
    parser.add_argument("--steps", type=int, default=6, help="steps before the peak is read (6, after 3 of warm-up)")
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    arguments = parser.parse_args()
    rows = []
    for name in arguments.plans:
        for precision in arguments.precisions:
            rows.append(row(name, precision, arguments.steps))
            print(f"{name} {precision}: {rows[-1]['excess']:+.1%}", flush=True)
    before = harness.read_record("predicted") or {"results": []}
    ran = {(each["plan"], each["precision"]) for each in rows}
    rows = [*(each for each in before["results"] if (each["plan"], each["precision"]) not in ran), *rows]
    record = harness.write_record("predicted", vars(arguments), rows)
    print_rows(rows)
    print(f"record: {record.relative_to(record.parents[2])}")


if __name__ == "__main__":
    main()
