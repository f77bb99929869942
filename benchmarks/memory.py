"""Question `memory`: does a rank take what the formula says?

    python -m benchmarks.memory [--steps 6] [--case compute]

Runs Shoal and torch DDP on 2 ranks, one after the other, each alone, and compares each rank's peak PSS with parameters
+ gradients + optimizer + activations by formula (`formulas`) plus the baseline: the same contender after a step of a
model of next to nothing.
Target: within 10%. The peak is that of the whole life of the process, start included. Writes results/memory.json.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness, peers, workload
from benchmarks.contenders import shoal
from benchmarks.formulas import MemoryTerms, ddp_terms, shoal_terms
from benchmarks.processes import Build, ProcessGroup, Step
from benchmarks.workload import CASES, MODEL, Case

RANKS = 2
MIB = 2**20
TARGET = 0.10
NEXT_TO_NOTHING = replace(MODEL, vocab_size=64, d_model=16, layers=1, heads=1, d_ff=None)


def baseline(case: Case, precision: str, of: Build) -> Step:
    """The contender `of` with next to no model: an interpreter with all the code that a training step loads.

    Only that code counts: torch's first optimizer step alone imports 80 MiB of modules. The process is fresh and ends
    after this.
    """
    workload.MODEL = NEXT_TO_NOTHING
    return of(case, precision)


def peak_pss() -> int:
    """Bytes: this process's peak RSS less what it shares with others now (RSS - PSS), which after the first step no
    longer grows.

    Linux keeps the peak of RSS exactly (VmHWM) and no peak of PSS; sampling would miss short peaks.
    """
    status = _kib(Path("/proc/self/status"))
    rollup = _kib(Path("/proc/self/smaps_rollup"))
    return 1024 * (status["VmHWM"] - (rollup["Rss"] - rollup["Pss"]))


def _kib(path: Path) -> dict[str, int]:
    """The lines "Name:  123 kB" of a /proc file."""
    fields = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in fields if len(words) == 3 and words[2] == "kB"}


def peak_of(build: Build, case: Case, precision: str, steps: int) -> int:
    """Bytes: the mean over the ranks of the peak PSS after `steps` steps, nothing else of the benchmark running."""
    with ProcessGroup(build, {"case": case, "precision": precision}, size=RANKS) as group:
        group.turn(steps)
        peaks = group.call(peak_pss)
    return sum(peaks) // len(peaks)


def row(name: str, precision: str, terms: MemoryTerms, floor: int, peak: int) -> dict[str, Any]:
    """One line of the record: the terms, their sum with the baseline, the measured peak, and how far off the sum is."""
    predicted = terms.total + floor
    return {
        "contender": name,
        "precision": precision,
        **asdict(terms),
        "baseline": floor,
        "predicted": predicted,
        "measured": peak,
        "excess": peak / predicted - 1,
    }


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Prints MiB a rank, one line a contender and precision."""
    columns = ("parameters", "gradients", "optimizer", "activations", "baseline", "predicted", "measured")
    table = Table(
        title=f"Peak PSS a rank, MiB (target: measured within {TARGET:.0%} of predicted)", title_justify="left"
    )
    for column in ("contender", "precision", *columns, "measured - predicted"):
        table.add_column(column, justify="left" if column in ("contender", "precision") else "right")
    for line in rows:
        table.add_row(
            line["contender"],
            line["precision"],
            *(f"{line[key] / MIB:.0f}" for key in columns),
            f"{line['excess']:+.1%}",
        )
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description="Peak PSS a rank against the formula."
    )
    parser.add_argument("--steps", type=int, default=6, help="steps before the peak is read (6, after 3 of warm-up)")
    parser.add_argument("--case", choices=list(CASES), default="compute")
    arguments = parser.parse_args()
    case = CASES[arguments.case]
    share = case.batch // RANKS
    rows = []
    for precision in ("fp32", "bf16"):
        for name, build, terms in (("shoal", shoal, shoal_terms), ("ddp", peers.ddp, ddp_terms)):
            floor = peak_of(partial(baseline, of=build), case, precision, 1)
            peak = peak_of(build, case, precision, arguments.steps)
            rows.append(row(name, precision, terms(MODEL, share, case.sequence, precision), floor, peak))
    record = harness.write_record("memory", vars(arguments), rows)
    print_rows(rows)
    print(f"record: {record.relative_to(record.parents[2])}")


if __name__ == "__main__":
    main()
