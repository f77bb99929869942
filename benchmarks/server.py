"""Question `server`: what do sessions and the parameter server cost, beside torch.distributed.rpc?

    python -m benchmarks.server [--rounds 5] [--seconds 0.8] [--rows 10000000] [--quick]

The round trip of a small message and the push and pull of 32 MB by contenders in turn; gradients a second of 1, 2 and 4
workers by policy, also where one of 4 is a straggler, policies in turn; rows of a table pulled and pushed a second.
Writes results/server.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks import server_contenders as contenders
from benchmarks.processes import Build, ProcessGroup
from benchmarks.targets import Target, judge, print_targets

LARGE = 32 * 2**20 // 4
WIDTH, AT_ONCE = 64, 65_536

CARRIERS: dict[str, tuple[Build, str]] = {
    "shared memory": (partial(contenders.session, True), "Shoal's session through shared memory"),
    "sockets": (partial(contenders.session, False), "Shoal's session over TCP, loopback"),
    "rpc": (partial(contenders.rpc, False), "torch.distributed.rpc as it comes: its own shared memory"),
    "rpc sockets": (partial(contenders.rpc, True), "torch.distributed.rpc held to sockets"),
}

CASES = {
    "round trip": (contenders.SMALL, 500),
    "push+pull of 32 MB": (LARGE, 5),
}
"""Numbers of a message, and the steps of a turn."""

CREWS = (("1", 1, False), ("2", 2, False), ("4", 4, False), ("4, one 5x slower", 4, True))

TARGETS = (
    Target("round trip sockets rpc sockets", "sockets: round trip over that of rpc on sockets", 0.7, at_least=False),
    Target("round trip shared memory rpc", "shared memory: round trip over that of rpc as it comes", 0.2, False),
    Target("straggler Async Sync", "4 workers, one 5x slower: gradients a second, Async over Sync", 2.5),
)


def messages(rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Both cases of messages, all contenders in turn: parts of the record."""
    results = []
    with ExitStack() as stack:
        groups = {name: stack.enter_context(ProcessGroup(build, {}, size=2)) for name, (build, _) in CARRIERS.items()}
        for case, (numel, full) in CASES.items():
            print(case, flush=True)
            steps = 2 if quick else full
            pairs = {name: contenders.Pair(group, numel) for name, group in groups.items()}
            samples = harness.measure(pairs, rounds, steps)
            notes = {name: note for name, (_, note) in CARRIERS.items()}
            results.append(harness.result_of(samples, "rpc", notes, case=case, steps=steps))
    return results


def policies(rounds: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Gradients a second in each round, by crew and policy."""
    found: dict[str, dict[str, list[float]]] = {
        crew: {name: [] for name in contenders.POLICIES} for crew, _, _ in CREWS
    }
    trial = 0
    with ProcessGroup(contenders.idle, {}, size=5) as group:
        for _ in range(rounds):
            for crew, workers, straggler in CREWS:
                for name in contenders.POLICIES:
                    run = partial(contenders.throughput, trial, name, workers, straggler, seconds)
                    found[crew][name].append(group.call(run)[0])
                    trial += 1
    return found


def rows(rounds: int, count: int) -> dict[str, dict[str, list[float]]]:
    """Rows pulled and pushed a second in each round, by carrier."""
    print("rows", flush=True)
    with ProcessGroup(contenders.idle, {}, size=2) as group:
        found: dict[str, dict[str, list[float]]] = group.call(partial(contenders.rows, count, WIDTH, AT_ONCE, rounds))[
            1
        ]
    return found


def figures(results: Mapping[str, Any]) -> dict[str, float]:
    """What the targets are about: ratios within a round, their median."""
    ratios = {}
    for case in results["messages"]:
        for ours, theirs in (("sockets", "rpc sockets"), ("shared memory", "rpc")):
            ratios[f"{case['case']} {ours} {theirs}"] = 1 / harness.times_over(case["contenders"], theirs, ours)
    slowed = results["policies"][CREWS[-1][0]]
    pairs = [one / other for one, other in zip(slowed["Async"], slowed["Sync"], strict=True)]
    return {**ratios, "straggler Async Sync": statistics.median(pairs)}


def table(results: Mapping[str, Any]) -> Table:
    """One table of all: a row a figure, with its quartiles over the rounds."""
    made = Table(title="server", title_justify="left")
    for column in ("what", "by"):
        made.add_column(column)
    for column in ("median", "quartiles", "unit"):
        made.add_column(column, justify="right")
    for case in results["messages"]:
        small = case["case"] == "round trip"
        for name, row in case["contenders"].items():
            steps = [statistics.median(turn) * (1000 if small else 1) for turn in row["samples_ms"]]
            made.add_row(case["case"], name, *_cells(steps), "us" if small else "ms")
        made.add_section()
    for crew, by_policy in results["policies"].items():
        for name, found in by_policy.items():
            made.add_row(f"workers: {crew}", name, *_cells(found), "gradients/s")
        made.add_section()
    for name, both in results["rows"].items():
        for what, found in both.items():
            made.add_row(f"rows {what}", name, *_cells(found), "rows/s")
    return made


def _cells(found: Sequence[float]) -> tuple[str, str]:
    low, middle, high = harness.quartiles(found)
    return f"{middle:,.1f}", f"{low:,.1f}..{high:,.1f}"


def main() -> None:
    arguments = _arguments()
    load = os.getloadavg()
    results: dict[str, Any] = {
        "messages": messages(arguments.rounds, arguments.quick),
        "policies": policies(arguments.rounds, arguments.seconds),
        "rows": rows(arguments.rounds, arguments.rows),
        "load_before": load,
    }
    results["targets"] = judge(TARGETS, figures(results))
    record = harness.write_record("server", vars(arguments), results)
    Console(width=160).print(table(results))
    for case in results["messages"]:
        for warning in case["warnings"]:
            print(f"warning: {warning}")
    print(f"load before: {load[0]:.1f}")
    print_targets(results["targets"])
    print(f"record: {record.relative_to(record.parents[2])}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.server", description="Sessions and the parameter server, beside torch's rpc."
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (5)")
    parser.add_argument("--seconds", type=float, default=0.8, help="of each trial of a policy (0.8)")
    parser.add_argument("--rows", type=int, default=10_000_000, help="of the table of width 64 (10,000,000)")
    return harness.parse(parser, "1 round, 2 messages a turn, 100,000 rows", rounds=1, seconds=0.2, rows=100_000)


if __name__ == "__main__":
    main()
