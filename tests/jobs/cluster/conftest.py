"""A job file for schedulers, and commands of our own in place of a scheduler's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.jobs.cluster.request import Request, read_request

JOB = """\
[model]
name = "gpt"
preset = "1m"

[train]
steps = 10

[run]
dir = "/data/runs/first"
nproc = 2

[cluster]
nodes = 2
cpus = 9
memory = "16GiB"
gpus = 2
time = "1-12:00:00"
queue = "gpu"
image = "lab/shoal:1"
volumes = {training = "/data"}
env = {NCCL_DEBUG = "WARN", GREETING = "it's on"}
setup = ["echo set up"]
finish = ["echo finished"]
options = ["--account=lab"]
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """My job.toml in the working directory, which has a blank in its name."""
    directory = tmp_path / "a lab"
    directory.mkdir()
    monkeypatch.chdir(directory)
    path = directory / "My job.toml"
    path.write_text(JOB)
    return path


@pytest.fixture
def request_of(job_file: Path) -> Callable[..., Request]:
    """The request of that job file, with values replaced."""

    def read(**values: Any) -> Request:
        return read_request(job_file, [f"cluster.{key}={value}" for key, value in values.items()])

    return read


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a command of that name and shell script first in the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("shoal.jobs.cluster.local.environment", lambda: dict(os.environ))
    monkeypatch.setattr("shoal.jobs.cluster.slurm.environment", lambda: dict(os.environ))

    def put(name: str, script: str) -> None:
        path = folder / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    return put
