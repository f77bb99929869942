"""Question `straggler`: what does the whole still do when one rank is slow?

    python -m benchmarks.straggler [--ranks 2] [--rounds 5] [--quick]

The MLP of `mlp`; the last rank sleeps, so that its step takes 5 times the others' (a step without communication,
measured first). Samples a second of all ranks together: synchronous all-reduce, local SGD, asynchronous averaging.
Writes results/straggler.json.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness, mlp
from benchmarks.mlp import ROWS
from benchmarks.processes import ProcessGroup
from benchmarks.targets import Target, judge, print_targets
from shoal.plan import Option

SLOWDOWN = 5
SYNCHRONOUS = "allreduce"
SETTING_STEPS = 10
"""Steps without communication that say how long the slow rank sleeps."""


@dataclass(frozen=True)
class Entry:
    """One contender: plan.exchange, its note, and whether ranks go at their own pace."""

    exchange: Option
    note: str
    own_pace: bool = False


CONTENDERS: dict[str, Entry] = {
    SYNCHRONOUS: Entry("allreduce", "gradients summed at every step"),
    "local_sgd": Entry({"name": "local_sgd", "every": 8}, "weights averaged every 8 steps, which all wait for"),
    "async_average": Entry(
        {"name": "async_average", "interval_ms": 500.0}, "weights averaged in the background, every 500 ms", True
    ),
}

TARGETS = (
    Target("async_average", "samples a second of asynchronous averaging over those of synchronous all-reduce", 2.5),
)


@dataclass(frozen=True)
class Whole:
    """A contender's ranks as the harness takes turns with them: a turn is one figure, milliseconds a sample of all
    ranks together."""

    group: ProcessGroup
    ranks: int
    own_pace: bool

    def turn(self, steps: int) -> list[float]:
        counts = steps_by_rank(steps, self.ranks, self.own_pace)
        return [ms_a_sample(self.group.turns(counts))]

    def cpu_seconds(self) -> float:
        return self.group.cpu_seconds()


def steps_by_rank(steps: int, ranks: int, own_pace: bool) -> list[int]:
    """`steps` of the slow rank, which is the last, and what the others do meanwhile."""
    return [steps * SLOWDOWN if own_pace else steps] * (ranks - 1) + [steps]


def ms_a_sample(times: list[list[float]]) -> float:
    """From each rank's milliseconds by step: the time until the last of them was done, over the samples of all."""
    return max(sum(steps) for steps in times) / (ROWS * sum(len(steps) for steps in times))


def sleep_of_the_slow(step_ms: float, ranks: int) -> tuple[float, ...]:
    """Milliseconds that each rank sleeps in a step, where a step takes `step_ms` without sleep."""
    return (*(0.0 for _ in range(ranks - 1)), (SLOWDOWN - 1) * step_ms)


def run(ranks: int, rounds: int, steps: int) -> dict[str, Any]:
    """Measures a step, then runs the contenders in turn; the record's results."""
    with ProcessGroup(mlp.shoal, {"exchange": "none"}, size=ranks) as group:
        step_ms = statistics.median(group.turn(SETTING_STEPS))
    print(f"a step takes {step_ms:.1f} ms; the slow rank's {SLOWDOWN} times as long", flush=True)
    delays = sleep_of_the_slow(step_ms, ranks)
    with ExitStack() as stack:
        contenders = {}
        for name, entry in CONTENDERS.items():
            print(f"starting {name}", flush=True)
            group = stack.enter_context(
                ProcessGroup(mlp.shoal, {"exchange": entry.exchange, "delays_ms": delays}, size=ranks)
            )
            contenders[name] = Whole(group, ranks, entry.own_pace)
        samples = harness.measure(contenders, rounds, steps)
    notes = {name: entry.note for name, entry in CONTENDERS.items()}
    return harness.result_of(samples, SYNCHRONOUS, notes, ranks=ranks, steps=steps, step_ms=step_ms, slowdown=SLOWDOWN)


def table(result: Mapping[str, Any]) -> Table:
    """A row a contender; the ratios are of the same round."""
    made = Table(
        title=f"{result['ranks']} ranks, one {result['slowdown']} times slower: the whole", title_justify="left"
    )
    made.add_column("contender")
    for column in ("samples/s", "quartiles", "x of synchronous", "min..max"):
        made.add_column(column, justify="right")
    made.add_column("what it is")
    for name, row in result["contenders"].items():
        (low, high), (least, most) = row["quartiles_ms"], row["share_range"]
        figures = (
            f"{1e3 / row['median_ms']:.0f}",
            f"{1e3 / high:.0f}..{1e3 / low:.0f}",
            f"{row['share']:.2f}",
            f"{least:.2f}..{most:.2f}",
        )
        made.add_row(name, *figures, row["note"])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.straggler", description="Throughput when one rank is slow."
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks, the last of which is slow (2)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (5)")
    parser.add_argument("--steps", type=int, default=24, help="steps of the slow rank a turn (24)")
    arguments = harness.parse(parser, "2 rounds of 8 steps", rounds=2, steps=8)
    result = run(arguments.ranks, arguments.rounds, arguments.steps)
    targets = judge(TARGETS, {name: row["share"] for name, row in result["contenders"].items()})
    record = harness.write_record("straggler", vars(arguments), {**result, "targets": targets})
    console = Console(width=160)
    console.print(table(result))
    for warning in result["warnings"]:
        console.print(f"warning: {warning}")
    print_targets(targets)
    print(f"record: {record.relative_to(record.parents[2])}")


if __name__ == "__main__":
    main()
