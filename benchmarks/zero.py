"""Question `zero`: what do ZeRO's stages cost in time and memory, with Shoal and with its peers?

    python -m benchmarks.zero [--model 33m,124m] [--precision fp32,bf16] [--stage 1,2,3] [--pairs] [--rounds 5]
    [--quick]

2 processes of one thread, 4 rows of 256 tokens a rank; a set is one model, precision and stage: Shoal, those who shard
as much, and the limit, Shoal's engine without exchange; with --pairs each peer has a set of its own with these two,
where memory is too small for all at once. Times in turn as in `dp`; memory is each process's peak PSS (see `memory`),
read at the end of the same run. Writes results/zero_MODEL_PRECISION.json.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness, workload
from benchmarks.contenders import LIMIT, ZERO, Entry
from benchmarks.memory import MIB, peak_pss
from benchmarks.processes import Build, ProcessGroup, Step
from benchmarks.targets import Target, judge, print_targets
from benchmarks.workload import CASES, Case
from shoal.models.presets import PRESETS

RANKS = 2
OURS = "shoal"
MODELS = ("33m", "124m")
TARGETS = [
    *(
        Target(f"{model} of the limit", f"ZeRO-3, {model} fp32: share of the no-communication limit", 0.95)
        for model in MODELS
    ),
    *(
        Target(f"{model} {stage} {peer} {what}", f"ZeRO-{stage}, {model} fp32: {peer}'s {what} over ours", 1.0)
        for model in MODELS
        for stage, peer in ((1, "deepspeed"), (1, "zero-redundancy"), (2, "deepspeed"), (3, "deepspeed"), (3, "fsdp2"))
        for what in ("time", "memory")
    ),
]


def of_model(case: Case, precision: str, preset: str, build: Build) -> Step:
    """`build` with another model."""
    workload.MODEL = PRESETS[preset]
    return build(case, precision)


def entries(stage: int, pairs: bool) -> list[dict[str, Entry]]:
    """Who runs at the same time: all of a stage, or ours and the limit with one of the peers each time."""
    if not pairs:
        return [ZERO[stage]]
    both = {name: ZERO[stage][name] for name in (LIMIT, OURS)}
    return [{**both, name: entry} for name, entry in ZERO[stage].items() if name != LIMIT and not name.startswith(OURS)]


def run_set(
    model: str, case: Case, precision: str, stage: int, rounds: int, contenders: Mapping[str, Entry]
) -> dict[str, Any]:
    """One set of the record."""
    with ExitStack() as stack:
        groups = {}
        for name, entry in contenders.items():
            print(f"{model} {precision} ZeRO-{stage}: starting {name}", flush=True)
            build = partial(of_model, preset=model, build=entry.build)
            groups[name] = stack.enter_context(ProcessGroup(build, {"case": case, "precision": precision}, size=RANKS))
        samples = harness.measure(groups, rounds, case.steps)
        peaks = {name: max(group.call(peak_pss)) for name, group in groups.items()}
    notes = {name: entry.note for name, entry in contenders.items()}
    result = harness.result_of(
        samples,
        LIMIT,
        notes,
        case=f"{model}, ZeRO-{stage}",
        precision=precision,
        steps=case.steps,
        model=model,
        stage=stage,
    )
    for name, peak in peaks.items():
        result["contenders"][name]["peak_pss"] = peak
    return result


def figures(results: list[dict[str, Any]]) -> dict[str, float]:
    """What TARGETS name, of the sets in fp32; of several shares of the limit the smallest."""
    found: dict[str, float] = {}
    for result in results:
        if result["precision"] != "fp32":
            continue
        rows, model, stage = result["contenders"], result["model"], result["stage"]
        if stage == 3:
            found[f"{model} of the limit"] = min(rows[OURS]["share"], found.get(f"{model} of the limit", math.inf))
        for peer in rows.keys() - {OURS, LIMIT}:
            found[f"{model} {stage} {peer} time"] = harness.times_over(rows, peer, OURS)
            found[f"{model} {stage} {peer} memory"] = rows[peer]["peak_pss"] / rows[OURS]["peak_pss"]
    return found


def show_memory(results: list[dict[str, Any]]) -> None:
    table = Table(title="peak PSS of a rank, MiB", title_justify="left")
    for heading in ("set", "contender", "MiB"):
        table.add_column(heading, justify="right" if heading == "MiB" else "left")
    for result in results:
        for name, row in result["contenders"].items():
            table.add_row(f"{result['case']}, {result['precision']}", name, f"{row['peak_pss'] / MIB:.0f}")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=harness.several(list(MODELS)), default=["33m"])
    parser.add_argument("--precision", type=harness.several(["fp32", "bf16"]), default=["fp32", "bf16"])
    parser.add_argument("--stage", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = harness.parse(parser, "one round of one step", rounds=1)
    case = replace(CASES["compute"], steps=1) if arguments.quick else CASES["compute"]
    for model, precision in itertools.product(arguments.model, arguments.precision):
        results = [
            run_set(model, case, precision, stage, arguments.rounds, contenders)
            for stage in arguments.stage
            for contenders in entries(stage, arguments.pairs)
        ]
        for result in results:
            harness.print_table(result)
        show_memory(results)
        wanted = [target for target in TARGETS if target.key.startswith(f"{model} ") and precision == "fp32"]
        judged = judge(wanted, figures(results))
        print_targets(judged)
        record = {"sets": results, "targets": judged}
        print(f"record: {harness.write_record(f'zero_{model}_{precision}', vars(arguments), record, ('deepspeed',))}")


if __name__ == "__main__":
    main()
