"""Question: does a step on one GPU take the time and the memory that the planner says?

    python3 -m benchmarks.gpu.planner [--device cuda] [--preset 124m,350m,1.3b] [--tokens 16384] [--steps 30]
    [--kinds plain,full,compiled] [--machine h200]

Trains GPTs in bf16 by `shoal train` with `plan = "auto"`: as they are, recomputed, with compiled blocks; then asks
`shoal plan --compare` for what was predicted from this machine's measured rates, and once more after it has learned
from another of these runs. `--machine` names a built-in description: what it says beforehand of the same job. Needs
Shoal's own packages (typer, rich ...) beside torch. Writes results/gpu_planner.json.
`--device cpu --preset 1m --tokens 512` runs the same road without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.records import Record, hardware, options, run
from shoal.models import PRESETS

KINDS = {"plain": {"recompute": '"none"'}, "full": {"recompute": '"full"'}, "compiled": {"compile": "true"}}
"""What `[plan]` gives beside `name = "auto"`."""
SHOAL = (sys.executable, "-c", "from shoal.cli import main; main()")
TIME, MEMORY = "time of a step", "memory of the fullest rank"


@dataclass(frozen=True)
class Case:
    """One run of `shoal train`, in a folder of its own."""

    preset: str
    kind: str
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.preset}, {self.kind}"

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def write(self, tokens: int, steps: int) -> Path:
        """The job file."""
        rows = max(1, tokens // PRESETS[self.preset].sequence)
        given = "\n".join(f"{key} = {value}" for key, value in KINDS[self.kind].items())
        self.folder.mkdir(parents=True)
        path = self.folder / "job.toml"
        path.write_text(
            f'[model]\nname = "gpt"\npreset = "{self.preset}"\n'
            f'[train]\nsteps = {steps}\nglobal_batch = {rows}\nprecision = "bf16"\n'
            f'[plan]\nname = "auto"\n{given}\n'
            f'[run]\ndir = "{self.run_dir}"\neval_samples = 8\ntrackers = []\n'
        )
        return path


def shoal(cache: Path, *words: str) -> str:
    """What the command prints. Raises CalledProcessError where it fails; what it has said stands on the terminal."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.run([*SHOAL, *words], env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def compared(case: Case, cache: Path, taught_by: Case | None = None) -> dict[str, dict[str, Any]]:
    """What `--compare` says of a run, by term, with what `cache` knows, and what it learns from `taught_by` first."""
    with tempfile.TemporaryDirectory() as copy:
        known = Path(shutil.copytree(cache, Path(copy) / "cache"))
        if taught_by is not None:
            shoal(known, "plan", "--compare", str(taught_by.run_dir))
        said = json.loads(shoal(known, "plan", "--compare", str(case.run_dir), "--json"))
    return {term["what"]: term for term in said["terms"]}


def said_by(machine: str, case: Case, cache: Path) -> float:
    """Seconds of a step as one device of a built-in description is said to take."""
    words = ("plan", str(case.run_dir / "resolved.toml"), "--on", f"{machine}x1", "--json")
    return float(json.loads(shoal(cache, *words))["seconds"])


def row(case: Case, teacher: Case, cache: Path, machine: str | None) -> dict[str, Any]:
    """A line of the table, with all terms."""
    terms, learned = compared(case, cache), compared(case, cache, teacher)
    peak = next(term for what, term in terms.items() if what.startswith(MEMORY))
    return {
        "case": case.name,
        "measured_s": terms[TIME]["measured"],
        "predicted_s": terms[TIME]["predicted"],
        "learned_s": learned[TIME]["predicted"],
        "learned_from": teacher.name,
        "described_s": said_by(machine, case, cache) if machine else None,
        "memory": peak["what"],
        "measured_bytes": peak["measured"],
        "predicted_bytes": peak["predicted"],
        "terms": [term for term in terms.values() if term["unit"] in ("s", "bytes")],
    }


def trained(cases: Sequence[Case], cache: Path, arguments: argparse.Namespace) -> Iterator[Case]:
    """Those whose run came to its end, one after the other, with one cache of rates."""
    for case in cases:
        path, began = case.write(arguments.tokens, arguments.steps), time.monotonic()
        try:
            shoal(cache, "train", str(path), "--nproc", "1")
        except subprocess.CalledProcessError as error:
            print(f"{case.name}: shoal train ended with {error.returncode}\n{error.stdout[-2000:]}", flush=True)
        else:
            print(f"{case.name}: trained in {time.monotonic() - began:.0f} s", flush=True)
            yield case


def times(arguments: argparse.Namespace, record: Record) -> None:
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        folder = Path(directory)
        cases = [
            Case(preset, kind, folder / f"{preset}-{kind}")
            for preset in arguments.preset.split(",")
            for kind in arguments.kinds.split(",")
        ]
        done = list(trained(cases, folder / "cache", arguments))
        teachers = [done[place - 1] for place in range(len(done))]
        table: list[dict[str, Any]] = []
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
            made = pool.map(
                lambda case, teacher: row(case, teacher, folder / "cache", arguments.machine), done, teachers
            )
            for line in made:
                table.append(line)
                record.keep(table=table)
    show(table, arguments)
    if len(done) < len(cases):
        raise SystemExit(1)


def show(table: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    print(f"\n{hardware(arguments.device)}, bf16, {arguments.tokens} tokens a step; predicted over measured")
    for line in table:
        seconds, size = line["measured_s"], line["measured_bytes"]
        described = f", {arguments.machine} {line['described_s'] / seconds:5.2f}" if line["described_s"] else ""
        memory = f"{size / 2**20:9.0f} MiB, predicted {line['predicted_bytes'] / size:5.2f}" if size else "not recorded"
        print(
            f"{line['case']:18s} {seconds * 1e3:9.2f} ms: from rates {line['predicted_s'] / seconds:5.2f}, "
            f"learned {line['learned_s'] / seconds:5.2f}{described}; {memory}"
        )


def main() -> None:
    parser = options("planner")
    parser.add_argument("--preset", default="124m,350m,1.3b", help=f"of {', '.join(PRESETS)}")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--tokens", type=int, default=16384, help="a step")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--machine", help="a built-in description that this machine has: h100, h200 ...")
    parser.add_argument("--directory", type=Path, help="of the runs, which end with a checkpoint each")
    run("gpu_planner", parser.parse_args(), lambda arguments: (), times)


if __name__ == "__main__":
    main()
