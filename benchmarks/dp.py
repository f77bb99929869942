"""Question `dp`: what does data parallelism cost, with Shoal and with its peers?

    python -m benchmarks.dp [--rounds 7] [--quick] [--case compute] [--precision fp32] [--only shoal,ddp]

GPT of 33.7M parameters on 2 processes of one thread, in two cases (`compute`: 4 rows of 256 tokens a rank;
`communication`: 1 row of 64) and two precisions. The limit is `no-communication`: Shoal's engine with the exchange
removed, all ranks running at once, same kernels, same optimizer; `no-communication-by-hand` checks it with a plain
loop, `-norm` with one that looks at its gradient as the engine does (`overhead` is about these three). Each contender's
docstring in `peers` says what it does, bf16 above all. Writes results/dp.json.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from typing import Any

from benchmarks import harness
from benchmarks.contenders import CONTENDERS, LIMIT, run_entries
from benchmarks.workload import CASES, Case

RANKS = 2


def run_set(case: Case, precision: str, rounds: int, steps: int, names: list[str]) -> dict[str, Any]:
    """Runs the contenders of one case and precision in turn; prints the progress, returns the part of the record."""
    chosen = {name: CONTENDERS[name] for name in names if precision in CONTENDERS[name].precisions}
    limit = LIMIT if LIMIT in chosen else next(iter(chosen))
    return run_entries(chosen, replace(case, steps=steps), precision, rounds, RANKS, limit)


def main() -> None:
    arguments = _arguments()
    cases = [CASES[name] for name in arguments.case]
    names = [name for name in CONTENDERS if arguments.only is None or name in arguments.only]
    results = [
        run_set(case, precision, arguments.rounds, arguments.steps or case.steps, names)
        for case, precision in itertools.product(cases, arguments.precision)
    ]
    record = harness.write_record("dp", vars(arguments), results, packages=("accelerate", "deepspeed"))
    for result in results:
        harness.print_table(result)
    print(f"record: {record.relative_to(record.parents[2])}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dp", description="Data parallel: Shoal and its peers, in turn."
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender (7)")
    parser.add_argument(
        "--steps", type=int, help="timed steps a turn (3 of the compute case, 12 of the communication case)"
    )
    parser.add_argument(
        "--only", type=harness.several(list(CONTENDERS)), help=f"contenders, of {', '.join(CONTENDERS)}"
    )
    parser.add_argument("--case", type=harness.several(list(CASES)), default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument(
        "--precision", type=harness.several(["fp32", "bf16"]), default=["fp32", "bf16"], help="of fp32, bf16"
    )
    return harness.parse(parser, "2 rounds of 2 steps", rounds=2, steps=2)


if __name__ == "__main__":
    main()
