"""Question `links`: what does a training step cost behind a slow link, and what do codecs and rare exchanges save?

    python -m benchmarks.links [--links 100mbit,1gbit,10gbit] [--only ddp,...] [--rounds 5] [--quick]
    (as root; iproute2)

The MLP of `mlp` (33.6 MB of gradients) on 2 ranks, each in a network namespace of its own (`namespaces`) and on a core
of its own. A round's figure is the mean of its steps: DiLoCo exchanges once in 50 steps, asynchronous averaging now and
then. Writes results/links.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from benchmarks import harness, mlp
from benchmarks.namespaces import cluster, obstacle
from benchmarks.processes import Build, ProcessGroup
from benchmarks.targets import Target, judge, print_targets

RANKS = 2
PEER, LIMIT = "ddp", "no-communication"
PERIOD = 50
"""Steps between two exchanges of DiLoCo: its turns are multiples."""


@dataclass(frozen=True)
class Link:
    """A bandwidth as tc writes it, and the timed steps of a turn for those who exchange at every step."""

    rate: str
    steps: int


@dataclass(frozen=True)
class Entry:
    """One contender: how to build it, its note, and whether it exchanges seldom, so that its turn is a whole PERIOD."""

    build: Build
    note: str
    seldom: bool = False


LINKS = {link.rate: link for link in (Link("100mbit", 3), Link("1gbit", 10), Link("10gbit", 30))}

CONTENDERS: dict[str, Entry] = {
    PEER: Entry(mlp.ddp, "torch DDP"),
    "ddp-fp16": Entry(partial(mlp.ddp, fp16_compress_hook), "torch DDP, its fp16 hook"),
    "allreduce": Entry(partial(mlp.shoal, "allreduce"), "Shoal, exact"),
    "fp16": Entry(partial(mlp.shoal, "fp16"), "Shoal, half precision on the wire"),
    "u8": Entry(partial(mlp.shoal, "bytegrad"), "Shoal, ByteGrad: 8 bits"),
    "u4+ef": Entry(
        partial(mlp.shoal, {"name": "bytegrad", "codec": "u4", "error_feedback": True}),
        "Shoal, 4 bits with error feedback",
    ),
    "diloco": Entry(
        partial(mlp.shoal, {"name": "diloco", "every": PERIOD, "codec": "fp16"}),
        f"Shoal, DiLoCo, H = {PERIOD}, fp16",
        True,
    ),
    "async": Entry(
        partial(mlp.shoal, {"name": "async_average", "interval_ms": 500.0}),
        "Shoal, asynchronous averaging, 500 ms",
        True,
    ),
    LIMIT: Entry(partial(mlp.shoal, "none"), "Shoal's engine, exchange removed", True),
}

TARGETS = (
    *(
        Target(
            f"{rate} allreduce {PEER}", f"{rate}: step time of exact all-reduce over that of DDP", 1.03, at_least=False
        )
        for rate in LINKS
    ),
    *(
        Target(f"{rate} {PEER} {name}", f"{rate}: {name}, times faster than DDP", bound)
        for rate, name, bound in (
            ("100mbit", "u8", 3.8),
            ("1gbit", "u8", 2.4),
            ("100mbit", "u4+ef", 7.5),
            ("1gbit", "u4+ef", 3.0),
            ("100mbit", "diloco", 30.0),
        )
    ),
    *(
        Target(
            f"{rate} async {LIMIT}",
            f"{rate}: step time of asynchronous averaging over that without communication",
            1.1,
            False,
        )
        for rate in LINKS
    ),
)


def turn_steps(entry: Entry, link: Link, quick: bool) -> int:
    """Timed steps of a turn; for those who exchange seldom a multiple of PERIOD, however quick it should be."""
    if entry.seldom:
        return PERIOD
    return 2 if quick else link.steps


def run_link(link: Link, names: Sequence[str], rounds: int, quick: bool) -> dict[str, Any]:
    """The contenders behind one kind of link, in turn: a part of the record."""
    chosen = {name: CONTENDERS[name] for name in names}
    steps = {name: turn_steps(entry, link, quick) for name, entry in chosen.items()}
    with cluster(RANKS, link.rate) as site, ExitStack() as stack:
        groups = {}
        for name, entry in chosen.items():
            print(f"{link.rate}: starting {name}", flush=True)
            groups[name] = stack.enter_context(ProcessGroup(entry.build, {}, size=RANKS, site=site))
        samples = harness.measure(groups, rounds, steps)
    notes = {name: entry.note for name, entry in chosen.items()}
    limit = PEER if PEER in chosen else next(iter(chosen))
    return harness.result_of(samples, limit, notes, figure=statistics.fmean, link=link.rate, steps=steps)


def figures(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By "RATE A B": the step time of A over that of B, the median over the rounds of both in the same round."""
    ratios = {}
    for result in results:
        means = {
            name: [statistics.fmean(steps) for steps in row["samples_ms"]] for name, row in result["contenders"].items()
        }
        for a, over in means.items():
            for b, under in means.items():
                pairs = [one / other for one, other in zip(over, under, strict=True)]
                ratios[f"{result['link']} {a} {b}"] = statistics.median(pairs)
    return ratios


def table(result: Mapping[str, Any]) -> Table:
    """One link: a row a contender, with how much faster than DDP it is and how much slower than computing alone."""
    ratios = figures([result])
    made = Table(title=f"{result['link']}, {result['rounds']} rounds", title_justify="left")
    made.add_column("contender")
    for column in ("ms/step", "quartiles", "x faster than DDP", "x of compute"):
        made.add_column(column, justify="right")
    made.add_column("what it is")
    for name, row in result["contenders"].items():
        low, high = row["quartiles_ms"]
        faster, slower = ratios.get(f"{result['link']} {PEER} {name}"), ratios.get(f"{result['link']} {name} {LIMIT}")
        cells = ("-" if ratio is None else f"{ratio:.2f}" for ratio in (faster, slower))
        made.add_row(name, f"{row['median_ms']:.1f}", f"{low:.1f}..{high:.1f}", *cells, row["note"])
    return made


def main() -> None:
    arguments = _arguments()
    if why := obstacle():
        sys.exit(f"benchmarks.links cannot run here: {why}")
    names = [name for name in CONTENDERS if arguments.only is None or name in arguments.only]
    results = [run_link(LINKS[rate], names, arguments.rounds, arguments.quick) for rate in arguments.links]
    targets = judge(TARGETS, figures(results))
    record = harness.write_record("links", vars(arguments), {"links": results, "targets": targets})
    console = Console(width=160)
    for result in results:
        console.print(table(result))
        for warning in result["warnings"]:
            console.print(f"warning: {warning}")
    print_targets(targets)
    print(f"record: {record.relative_to(record.parents[2])}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.links", description="A training step behind slow links."
    )
    parser.add_argument("--links", type=harness.several(list(LINKS)), default=list(LINKS), help=f"of {','.join(LINKS)}")
    parser.add_argument("--only", type=harness.several(list(CONTENDERS)), help=f"contenders, of {','.join(CONTENDERS)}")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender behind each link (5)")
    return harness.parse(parser, "2 rounds of 2 steps (50 where exchanges are rare)", rounds=2)


if __name__ == "__main__":
    main()
