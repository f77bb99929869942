"""What the GPU's benchmarks share: checks with the figure they saw, and the record."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent.parent / "results"


def check(what: str, seen: float, allowed: float) -> dict[str, Any]:
    """One check, printed as it comes: it holds if `seen` is at most `allowed`."""
    print(f"{'ok  ' if seen <= allowed else 'FAIL'} {what}: {seen:.3g} (allowed {allowed:.3g})", flush=True)
    return {"check": what, "seen": seen, "allowed": allowed}


def hardware(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU ({platform.machine()})"


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def write(name: str, device: str, arguments: dict[str, Any], checks: Sequence[dict[str, Any]], **more: Any) -> None:
    """Writes results/NAME.json if this was a GPU; exits with 1 if a check does not hold."""
    if device.startswith("cuda"):
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = {"hardware": hardware(device), "torch": torch.__version__, "commit": commit, "arguments": arguments}
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps({**about, "checks": checks, **more}, indent=1) + "\n")
    if any(each["seen"] > each["allowed"] for each in checks):
        raise SystemExit(1)
