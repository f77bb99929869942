"""Question `commits`: is a step as fast as it was on an earlier commit?

    python -m benchmarks.commits COMMIT [--only dp,zero,...] [--precision fp32,bf16] [--rounds 5] [--quick]

Checks COMMIT out beside this tree and runs Shoal of both in turn, A B A B, each in processes of its own that import the
package and the contender from their tree: data parallel, ZeRO 3, tensor parallel, a pipeline, experts. Writes
results/commits.json.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.processes import ProcessGroup, Step
from benchmarks.targets import Target, judge, print_targets

HERE = Path(__file__).resolve().parents[1]
BEFORE, NOW = "before", "now"
RANKS = 2
LARGE, SMALL = (
    {"name": "8x256", "sequence": 256, "batch": 8, "steps": 3},
    {"name": "2x64", "sequence": 64, "batch": 2, "steps": 12},
)
QUESTIONS: dict[str, dict[str, Any]] = {
    "dp": {"module": "contenders", "case": LARGE},
    "dp-small": {"module": "contenders", "case": SMALL},
    "zero": {"module": "contenders", "case": LARGE, "zero": 3},
    "tp": {"module": "tp", "case": LARGE},
    "pp": {"module": "pp", "case": LARGE, "schedule": "1f1b"},
    "moe": {"module": "moe", "case": LARGE, "per_token": 2},
}
"""The module with the contender `shoal`, the case, and further arguments."""
TARGETS = [
    Target(f"{name} {precision}", f"{name}, {precision}: time of a step over that of the earlier commit", 1.02, False)
    for name in QUESTIONS
    for precision in ("fp32", "bf16")
]


def of_tree(tree: str, module: str, case: Mapping[str, Any], precision: str, **options: Any) -> Step:
    """The contender `shoal` of a module of the benchmarks in `tree`."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("shoal", "benchmarks")]:
        del sys.modules[name]
    sys.path[:0] = [f"{tree}/src", tree]
    there = importlib.import_module(f"benchmarks.{module}")
    assert there.__file__ is not None and there.__file__.startswith(tree), there.__file__
    step: Step = there.shoal(importlib.import_module("benchmarks.workload").Case(**case), precision, **options)
    return step


def compared(trees: Mapping[str, str], name: str, precision: str, rounds: int) -> dict[str, Any]:
    """Both commits on one question, in turn."""
    question = QUESTIONS[name]
    with ExitStack() as stack:
        groups = {}
        for which, tree in trees.items():
            print(f"{name} {precision}: starting {which}", flush=True)
            given = {"tree": tree, "precision": precision, **question}
            groups[which] = stack.enter_context(ProcessGroup(of_tree, given, size=RANKS))
        samples = harness.measure(groups, rounds, question["case"]["steps"])
    notes = {BEFORE: "the earlier commit", NOW: "this tree"}
    return harness.result_of(samples, BEFORE, notes, case=name, precision=precision, steps=question["case"]["steps"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--only", type=harness.several(list(QUESTIONS)), default=list(QUESTIONS))
    parser.add_argument("--precision", type=harness.several(("fp32", "bf16")), default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = harness.parse(parser, "one round", rounds=1)
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as directory:
        old = f"{directory}/tree"
        subprocess.run(["git", "worktree", "add", "--detach", old, arguments.commit], cwd=HERE, check=True)
        try:
            trees = {BEFORE: old, NOW: str(HERE)}
            results = [
                compared(trees, name, precision, arguments.rounds)
                for name in arguments.only
                for precision in arguments.precision
            ]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", old], cwd=HERE, check=True)
    for result in results:
        harness.print_table(result)
    ratios = {
        f"{each['case']} {each['precision']}": harness.times_over(each["contenders"], NOW, BEFORE) for each in results
    }
    judged = judge(TARGETS, ratios)
    print_targets(judged)
    if not arguments.quick:
        print(harness.write_record("commits", vars(arguments), {"sets": results, "targets": judged}))


if __name__ == "__main__":
    main()
