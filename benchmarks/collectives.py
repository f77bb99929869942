"""Question `collectives`: how long does an operation between ranks of one host take, over shared memory and over gloo?

    python -m benchmarks.collectives [--ranks 2,4] [--operations all_reduce,...] [--rounds 5] [--quick]

Ranks of one thread each, tensors of 1 KiB to 64 MiB; the contenders are those of `carriers`, called back to back, in
turn. A ratio is gloo's time over the contender's, round by round. Writes results/collectives.json.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.carriers import CARRIERS, OPERATIONS
from benchmarks.processes import ProcessGroup
from benchmarks.targets import Target, judge, print_targets

PEER = "gloo"
KIB, MIB = 2**10, 2**20
SIZES = tuple(KIB * 4**power for power in range(9))
QUICK_SIZES = (KIB, 256 * KIB)


@dataclass(frozen=True)
class OfCase:
    """A carrier's ranks in one case, as the harness takes turns with them: a turn is one figure, the median of its
    calls."""

    group: ProcessGroup
    operation: str
    num_bytes: int

    def turn(self, steps: int) -> list[float]:
        return [statistics.median(self.group.turn(steps, self.operation, self.num_bytes))]

    def cpu_seconds(self) -> float:
        return self.group.cpu_seconds()


def calls_a_turn(num_bytes: int) -> int:
    """Many short calls or a few long ones: a turn takes well under a second but for the largest tensors."""
    return max(5, min(100, 64 * MIB // num_bytes))


def figure_key(operation: str, ranks: int, num_bytes: int, contender: str) -> str:
    """The name of a ratio, for its target."""
    return f"{operation}, {ranks} ranks, {size_name(num_bytes)}, {contender}"


def size_name(num_bytes: int) -> str:
    """ "4 MiB" or "256 KiB"."""
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


def _target(operation: str, ranks: int, num_bytes: int, contender: str, bound: float) -> Target:
    key = figure_key(operation, ranks, num_bytes, contender)
    return Target(key, f"{key}: times faster than gloo", bound)


TARGETS = tuple(
    _target(operation, ranks, num_bytes, contender, bounds[ranks])
    for operation, num_bytes, contender, bounds in (
        ("all_reduce", KIB, "shm", {2: 100, 4: 40}),
        ("all_reduce", 4 * MIB, "shm", {2: 6, 4: 4.5}),
        ("reduce_scatter", 64 * MIB, "shm", {2: 5, 4: 5}),
        ("reduce_scatter", 64 * MIB, "in the segment", {2: 8, 4: 8}),
        ("all_gather", 64 * MIB, "shm", {2: 8, 4: 8}),
    )
    for ranks in (2, 4)
)


def run(ranks: int, operations: Sequence[str], sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """All cases of one number of ranks, whose processes live through all of them: a part of the record for each."""
    results = []
    with ExitStack() as stack:
        groups = {}
        for name, carrier in CARRIERS.items():
            print(f"{ranks} ranks: starting {name}", flush=True)
            groups[name] = stack.enter_context(ProcessGroup(carrier.build, {}, size=ranks, warm_up=0))
        for operation, num_bytes in itertools.product(operations, sizes):
            print(f"{ranks} ranks: {operation} of {size_name(num_bytes)}", flush=True)
            chosen = {name: group for name, group in groups.items() if operation in CARRIERS[name].operations}
            calls = calls_a_turn(num_bytes)
            samples = harness.measure(
                {name: OfCase(group, operation, num_bytes) for name, group in chosen.items()}, rounds, calls
            )
            notes = {name: CARRIERS[name].note for name in chosen}
            case: dict[str, Any] = {"operation": operation, "ranks": ranks, "bytes": num_bytes, "steps": calls}
            results.append(harness.result_of(samples, PEER, notes, **case))
    return results


def figures(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The ratio of every contender in every case, by `figure_key`."""
    return {
        figure_key(result["operation"], result["ranks"], result["bytes"], name): row["share"]
        for result in results
        for name, row in result["contenders"].items()
    }


def tables(results: Sequence[Mapping[str, Any]]) -> list[Table]:
    """A table for each operation and number of ranks: a row a size, milliseconds and, but for gloo itself, the ratio to
    gloo."""
    made = []
    for ranks, operation in dict.fromkeys((result["ranks"], result["operation"]) for result in results):
        cases = [result for result in results if (result["ranks"], result["operation"]) == (ranks, operation)]
        table = Table(
            title=f"{operation}, {ranks} ranks: ms a call (quartiles), times faster than gloo", title_justify="left"
        )
        table.add_column("bytes", justify="right")
        for name in cases[0]["contenders"]:
            table.add_column(name, justify="right")
        for case in cases:
            cells = (_cell(row, name == PEER) for name, row in case["contenders"].items())
            table.add_row(size_name(case["bytes"]), *cells)
        made.append(table)
    return made


def _cell(row: Mapping[str, Any], is_peer: bool) -> str:
    low, high = row["quartiles_ms"]
    time = f"{row['median_ms']:.3g} ({low:.3g}..{high:.3g})"
    return time if is_peer else f"{time}  {row['share']:.1f}x"


def main() -> None:
    arguments = _arguments()
    sizes = QUICK_SIZES if arguments.quick else SIZES
    results = [
        result for ranks in arguments.ranks for result in run(int(ranks), arguments.operations, sizes, arguments.rounds)
    ]
    targets = judge(TARGETS, figures(results))
    record = harness.write_record("collectives", vars(arguments), {"cases": results, "targets": targets})
    console = Console(width=160)
    for table in tables(results):
        console.print(table)
    print_targets(targets)
    for result in results:
        for warning in result["warnings"]:
            console.print(
                f"warning: {result['operation']}, {result['ranks']} ranks, {size_name(result['bytes'])}: {warning}"
            )
    print(f"record: {record.relative_to(record.parents[2])}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives", description="Collectives of one host, in turn."
    )
    parser.add_argument(
        "--ranks", type=harness.several(["2", "4"]), default=["2", "4"], help="numbers of ranks, of 2,4"
    )
    parser.add_argument(
        "--operations", type=harness.several(OPERATIONS), default=list(OPERATIONS), help=f"of {','.join(OPERATIONS)}"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender in each case (5)")
    return harness.parse(parser, "2 rounds of two small sizes", rounds=2)


if __name__ == "__main__":
    main()
