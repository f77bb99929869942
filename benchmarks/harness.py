"""Contenders of one question, run in turn in one run: A B C A B C, several rounds, then medians and ratios pair by
pair.

A machine drifts (clock, neighbours, memory), so a figure is compared only with figures of its own round, and never with
those of another run. The record has every sample, so that another summary can be made later.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"

IDLE_LIMIT = 0.01
"""The share of one core that the processes waiting for their turn may use together before the table warns."""


class Contender(Protocol):
    """What takes turns: `ProcessGroup`, or a fake in tests."""

    def turn(self, steps: int) -> list[float]:
        """Runs `steps` timed steps; returns the milliseconds of each."""

    def cpu_seconds(self) -> float:
        """CPU time used so far."""


@dataclass(frozen=True)
class Samples:
    """What `measure` saw. `rounds[name][r]` are the milliseconds of each step of contender `name` in round `r`;
    `idle_share[name]` is the share of one core that it used while others ran."""

    rounds: dict[str, list[list[float]]]
    idle_share: dict[str, float]


@dataclass(frozen=True)
class Summary:
    """One row of the table. A round's figure is the median (or mean, as `summarise` says) of its steps; `median_ms` and
    the quartiles are over the rounds. `share` is limit / contender, computed in each round, as median, least and
    greatest over the rounds."""

    median_ms: float
    quartiles_ms: tuple[float, float]
    share: float
    share_range: tuple[float, float]


def measure(contenders: Mapping[str, Contender], rounds: int, steps: int | Mapping[str, int]) -> Samples:
    """Gives every contender a turn of `steps` steps (of its own number, where that is a mapping), in order, `rounds`
    times over."""
    samples: dict[str, list[list[float]]] = {name: [] for name in contenders}
    idle_cpu = dict.fromkeys(contenders, 0.0)
    idle_seconds = dict.fromkeys(contenders, 0.0)
    for _ in range(rounds):
        for name, contender in contenders.items():
            others = {other: waiting.cpu_seconds() for other, waiting in contenders.items() if other != name}
            start = time.perf_counter()
            samples[name].append(contender.turn(steps if isinstance(steps, int) else steps[name]))
            seconds = time.perf_counter() - start
            for other, before in others.items():
                idle_cpu[other] += contenders[other].cpu_seconds() - before
                idle_seconds[other] += seconds
    return Samples(
        samples, {name: idle_cpu[name] / idle_seconds[name] if idle_seconds[name] else 0.0 for name in contenders}
    )


def summarise(
    samples: Samples, limit: str, figure: Callable[[Sequence[float]], float] = statistics.median
) -> dict[str, Summary]:
    """A row for each contender, with its share of the contender `limit`. `figure` makes one of a round's steps: the
    median forgives a hiccup; the mean counts what comes only every so many steps."""
    per_round = {name: [figure(steps) for steps in rounds] for name, rounds in samples.rounds.items()}
    return {name: _row(figures, per_round[limit]) for name, figures in per_round.items()}


def _row(figures: Sequence[float], limit: Sequence[float]) -> Summary:
    shares = [best / own for best, own in zip(limit, figures, strict=True)]
    low, _, high = quartiles(figures)
    return Summary(statistics.median(figures), (low, high), statistics.median(shares), (min(shares), max(shares)))


def times_over(rows: Mapping[str, Any], theirs: str, ours: str) -> float:
    """How many times as long the contender `theirs` takes as `ours`, of the rows of a record: the median over rounds of
    the ratio of their medians."""
    turns = ([statistics.median(steps) for steps in rows[name]["samples_ms"]] for name in (theirs, ours))
    return statistics.median(other / own for other, own in zip(*turns, strict=True))


def quartiles(figures: Sequence[float]) -> tuple[float, float, float]:
    """The quartiles of at least one figure, by linear interpolation between the sorted ones."""
    ordered = sorted(figures)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return at(0.25), at(0.5), at(0.75)


def parse(parser: argparse.ArgumentParser, what: str, **instead: Any) -> argparse.Namespace:
    """The arguments, with --quick: `what` it runs, as its help says, and the values that it puts in place of others."""
    parser.add_argument("--quick", action="store_true", help=f"{what}: does everything run?")
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(instead)
    return arguments


def print_table(result: Mapping[str, Any]) -> None:
    """Prints one set of a record (`result_of`): a row a contender, the limit marked, then the warnings."""
    title = f"{result['case']}, {result['precision']}, {result['rounds']} rounds of {result['steps']} steps"
    table = Table(title=title, title_justify="left")
    table.add_column("contender")
    for column in ("ms/step", "quartiles", "share of limit", "min..max"):
        table.add_column(column, justify="right")
    table.add_column("what it is")
    for name, row in result["contenders"].items():
        (low, high), (least, most) = row["quartiles_ms"], row["share_range"]
        mark = " (limit)" if name == result["limit"] else ""
        figures = (
            f"{row['median_ms']:.1f}",
            f"{low:.1f}..{high:.1f}",
            f"{row['share']:.3f}",
            f"{least:.3f}..{most:.3f}",
        )
        table.add_row(name + mark, *figures, row["note"])
    console = Console(width=160)
    console.print(table)
    for warning in result["warnings"]:
        console.print(f"warning: {warning}")


def idle_warnings(samples: Samples) -> list[str]:
    """A line for each contender that was busy while others were timed: then the figures of the run are not to be
    trusted."""
    return [
        f"{name} used {share:.1%} of a core while it waited for its turn"
        for name, share in samples.idle_share.items()
        if share > IDLE_LIMIT
    ]


def result_of(
    samples: Samples,
    limit: str,
    notes: Mapping[str, str],
    figure: Callable[[Sequence[float]], float] = statistics.median,
    **what: Any,
) -> dict[str, Any]:
    """One set of the record: `what` was measured, the summary of each contender (see `summarise`) and every sample."""
    rows = summarise(samples, limit, figure)
    return {
        **what,
        "rounds": len(samples.rounds[limit]),
        "limit": limit,
        "warnings": idle_warnings(samples),
        "contenders": {
            name: {
                **asdict(row),
                "note": notes[name],
                "idle_share": samples.idle_share[name],
                "samples_ms": samples.rounds[name],
            }
            for name, row in rows.items()
        },
    }


def write_record(name: str, arguments: Mapping[str, Any], results: Any, packages: Sequence[str] = ()) -> Path:
    """Writes `results/NAME.json`: date, commit, machine, versions of torch and `packages`, arguments, results, with ~
    for the user's home; of a quick run `results/quick/NAME.json`, which is no record. Returns its path."""
    record = {
        "question": name,
        "date": now(),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(("torch", "shoal", *packages)),
        "arguments": dict(arguments),
        "results": results,
    }
    folder = RESULTS / "quick" if arguments.get("quick") else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record, indent=1).replace(f"{Path.home()}/", "~/") + "\n")
    return path


def read_record(name: str) -> dict[str, Any] | None:
    """What `write_record` wrote last, None where there is nothing."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def now() -> str:
    """The time of a record."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def several(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The argparse type of a comma-separated choice of `known` names."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return chosen

    return parse


def commit() -> str:
    """The commit of the working tree, with "+changes" when it has uncommitted ones in the source or the benchmarks."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(("git", *words), cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "../src", "*.py")
    return git("rev-parse", "HEAD") + ("+changes" if changed else "")


def machine() -> dict[str, Any]:
    """What the figures depend on; no name of the machine."""
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=True),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions; a package that is not there says so."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
