"""The command line, called in this process or as a process of its own, on a job that trains in a moment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from shoal.cli import main
from shoal.comm import World
from shoal.jobs.read import load_job
from shoal.jobs.train import train
from tests.caches import cache_in

JOB = """
[model]
name = "gpt"
layers = 1
d_model = 16
heads = 2

[data]
source = "{corpus}"
sequence = 16
validation = 0.2

[train]
steps = 6
global_batch = 8
microbatch = 2
lr = 1e-2
schedule = "constant"
warmup = 0

[run]
dir = "{run_dir}"
trackers = []
save_every = 2
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """job.toml; its run goes to `run` beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", cache_in(tmp_path))
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(20):
        (corpus / f"{number:02}.txt").write_text("\n".join(f"{number} + {i} = {number + i}" for i in range(40)))
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(corpus=corpus, run_dir=tmp_path / "run"))
    return path


def train_here(job_file: Path, *sets: str) -> None:
    """Trains a job in this process: what else a run has to be there for, or is compared with. No report is drawn and no
    peak measured, which takes longer than all else."""
    job, origins = load_job(job_file, list(sets))
    no_report = patch("shoal.jobs.outcome.write_report", lambda run_dir: run_dir / "report.html")
    with no_report, patch("shoal.jobs.train.peak_flops", lambda engine: 1e11):
        train(job, origins, World.single("cpu"))


@dataclass(frozen=True)
class Answer:
    """What a command said and its exit code."""

    code: int
    out: str
    err: str


@pytest.fixture
def shoal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs a command in this process."""

    def call(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["shoal", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        said = capfd.readouterr()
        return Answer(code, said.out, said.err)

    return call


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command as a process; what is left at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "shoal.cli", *map(str, arguments)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
