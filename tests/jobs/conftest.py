"""A small corpus and a job on it that trains in a second."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from shoal.comm import World
from shoal.jobs.config import Data, Job, Run, Train
from shoal.report.metrics import RunRecords, read_metrics

MODEL = {"name": "gpt", "layers": 1, "d_model": 16, "heads": 2}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty documents of arithmetic, in which there is something to learn."""
    directory = tmp_path_factory.mktemp("corpus")
    for number in range(20):
        (directory / f"{number:02}.txt").write_text("\n".join(f"{number} + {i} = {number + i}" for i in range(40)))
    return directory


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data cache, for this process; ranks of the pool get it by `in_cache`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def draw_nothing(run_dir: Path) -> Path:
    """In place of `write_report`, which takes longer than all else of a tiny run."""
    (run_dir / "report.html").touch()
    return run_dir / "report.html"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No report is drawn and no peak measured."""
    for module in ("outcome", "evaluator"):
        monkeypatch.setattr(f"shoal.jobs.{module}.write_report", draw_nothing)
    monkeypatch.setattr("shoal.jobs.train.peak_flops", lambda engine: 1e11)


@pytest.fixture
def make_job(corpus: Path, tmp_path: Path) -> Callable[..., Job]:
    """A job of six steps; keywords replace values of [train], `run`, `data` and `model` whole tables' values."""

    def make(
        *,
        run: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        **train: Any,
    ) -> Job:
        values = {
            "steps": 6,
            "global_batch": 8,
            "microbatch": 2,
            "lr": 1e-2,
            "schedule": "constant",
            "warmup": 0,
            **train,
        }
        return Job(
            model={**MODEL, **(model or {})},
            train=Train(**values),
            data=replace(Data(source=str(corpus), sequence=16, validation=0.2), **(data or {})),
            run=Run(**{"dir": str(tmp_path / "run"), "trackers": [], **(run or {})}),
        )

    return make


@pytest.fixture
def alone() -> World:
    """A world of this process, on the CPU."""
    return World.single("cpu")


def records_of(job: Job) -> RunRecords:
    return read_metrics(Path(job.run.dir) / "metrics.jsonl")


def losses_of(job: Job) -> list[float]:
    return [record.loss for record in records_of(job).steps]


def in_cache(world: World, cache: str, job: Job) -> int:
    """What a rank of the pool runs: trains `job`; returns its last step."""
    from shoal.jobs.train import train

    os.environ["XDG_CACHE_HOME"] = cache
    with patch("shoal.jobs.outcome.write_report", draw_nothing):
        return train(job, world=world).step
