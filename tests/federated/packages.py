"""Flower and scikit-learn for these tests, kept out of the environment of Shoal.

Flower asks for other versions of protobuf, rich, typer and packaging than the rest. So all of it lies in a folder of
its own (`make .venv/fed`). A test of Flower runs in a process that has the folder before everything else;
scikit-learn's digits are a file, which is found in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv" / "fed"


def with_flower(program: str, *arguments: str, timeout: float = 240) -> str:
    """Runs a module in a process that can import Flower; returns what it printed. Fails where the process does."""
    _there()
    path = os.pathsep.join([str(FOLDER), str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", program, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def find_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the file of the digits be found during a test. Nothing else is imported from the folder."""
    _there()
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])


def _there() -> None:
    if not FOLDER.is_dir():
        raise ModuleNotFoundError(f"{FOLDER} is missing: run make test once, which sets it up")
