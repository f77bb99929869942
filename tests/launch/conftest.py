"""What the tests of real launchers share: a job, a way to run commands beside it, and what the local launcher makes of
it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.report.metrics import read_metrics
from tests.caches import cache_in
from tests.cli.conftest import JOB

SHOAL = [sys.executable, "-m", "shoal.cli"]
TRAIN = [*SHOAL, "train", "job.toml"]
RANKS = 3
LONG = ["--set", "train.steps=600", "--set", "run.save_every=0"]
"""A job that takes seconds, to be interrupted."""


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and a job, whose runs go below it."""
    folder = tmp_path_factory.mktemp("launchers")
    (folder / "corpus").mkdir()
    for number in range(20):
        (folder / f"corpus/{number:02}.txt").write_text("\n".join(f"{number} + {i} = {number + i}" for i in range(40)))
    (folder / "job.toml").write_text(JOB.format(corpus="corpus", run_dir="run"))
    return folder


@pytest.fixture(scope="session")
def start(place: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a command in `place`; keywords are variables of its environment."""

    def begin(*command: str, **variables: str) -> subprocess.Popen[str]:
        environ = {**os.environ, "XDG_CACHE_HOME": cache_in(place), "OMP_NUM_THREADS": "1", **variables}
        return subprocess.Popen(
            command, cwd=place, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return begin


@pytest.fixture(scope="session")
def run(start) -> Callable[..., str]:
    """Runs a command in `place` to its end and returns its output; it must succeed."""

    def call(*command: str, **variables: str) -> str:
        return ended(start(*command, **variables))

    return call


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == code, output
    return output


def losses(run_dir: Path, ranks: int = RANKS) -> list[float]:
    records = read_metrics(run_dir / "metrics.jsonl")
    assert records.run is not None and records.run.world == ranks and not records.warnings
    return [each.loss for each in records.steps]


@pytest.fixture(scope="session")
def expected(place: Path, run) -> list[float]:
    run(*TRAIN, "--nproc", str(RANKS), "--set", "run.dir=local")
    return losses(place / "local")


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


@pytest.fixture(scope="session")
def uninterrupted(place: Path, run) -> list[float]:
    run(*TRAIN, "--nproc", str(RANKS), *LONG, "--set", "run.dir=long")
    return losses(place / "long")
