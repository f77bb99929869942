"""What the GPU's benchmarks share: their common options, checks with the figure they saw, and the record."""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent.parent / "results"
HIDDEN = ("results", "checks", "times", "rank", "into")
"""Options that say nothing of what was measured."""


def options(script: str) -> argparse.ArgumentParser:
    """The parser of `script`, with the options that all scripts have."""
    parser = argparse.ArgumentParser(prog=f"python3 -m benchmarks.gpu.{script}")
    parser.add_argument("--device", default="cuda")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--checks", action="store_true", help="only the checks: nothing is timed")
    parts.add_argument("--times", action="store_true", help="no checks")
    parser.add_argument("--results", type=Path, help="directory of the record (on a GPU: benchmarks/results)")
    return parser


def check(what: str, seen: float, allowed: float) -> dict[str, Any]:
    """One check, printed as it comes: it holds if `seen` is at most `allowed`."""
    found = {"check": what, "seen": seen, "allowed": allowed}
    print(f"{'ok  ' if holds(found) else 'FAIL'} {what}: {seen:.3g} (allowed {allowed:.3g})", flush=True)
    return found


def holds(found: dict[str, Any]) -> bool:
    return bool(found["seen"] <= found["allowed"])


def worst(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference from `theirs`; infinite where a figure is not finite."""
    if not all(map(math.isfinite, (*ours, *theirs))):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def hardware(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU ({platform.machine()})"


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


class Record:
    """Keeps what a script has seen in DIRECTORY/NAME.json, written whenever something is added: a script that is
    stopped leaves what it had. A file of the same commit, hardware and torch is continued, any other replaced.

    - `arguments`: what `options` and the script's own ones gave; without `--results` only a GPU's figures are written
    """

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        on_gpu = arguments.device.startswith("cuda")
        directory = arguments.results or (RESULTS if on_gpu else None)
        self._path: Path | None = directory and directory / f"{name}.json"
        about = {"hardware": hardware(arguments.device), "torch": torch.__version__, "commit": commit()}
        self._content: dict[str, Any] = {**about, "arguments": {}, "checks": []}
        if self._path is not None and self._path.exists():
            before = json.loads(self._path.read_text())
            if about.items() <= before.items():
                self._content = before
        given = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
        self._content["arguments"] |= {key: value for key, value in given.items() if key not in HIDDEN}

    def check(self, found: Iterable[dict[str, Any]]) -> None:
        """Adds results of `check`, each in place of an earlier one of its name."""
        for each in found:
            others = [other for other in self._content["checks"] if other["check"] != each["check"]]
            self.keep(checks=[*others, each])

    def keep(self, **sections: Any) -> None:
        """Adds sections, in place of earlier ones of their names; a table joins what an earlier one has of others."""
        for name, section in sections.items():
            before = self._content.get(name)
            joined = {**before, **section} if isinstance(section, dict) and isinstance(before, dict) else section
            self._content[name] = joined
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_suffix(".new")  # the script may be stopped while it writes
            fresh.write_text(json.dumps(self._content, indent=1) + "\n")
            fresh.replace(self._path)

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends the script with exit code 1 if a check does not hold."""
        if kind is None and not all(map(holds, self._content["checks"])):
            raise SystemExit(1)


def run(
    name: str,
    arguments: argparse.Namespace,
    checks: Callable[[argparse.Namespace], Iterable[dict[str, Any]]],
    times: Callable[[argparse.Namespace, Record], None],
) -> None:
    """Checks, then times, of which `arguments` may leave one out, into the record `name`."""
    with Record(name, arguments) as record:
        if not arguments.times:
            record.check(checks(arguments))
        if not arguments.checks:
            times(arguments, record)


def commit() -> str:
    """The commit of this source tree; empty where there is no git."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
