"""Whatever a job says of its plan and its training, an engine is made of it or an error of ours; so also where the
tables have parameters."""

from __future__ import annotations

import random
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from shoal.comm import World
from shoal.errors import ShoalError
from shoal.jobs.assemble import make_engine
from shoal.jobs.choose import microbatches_of
from shoal.jobs.config import Job
from shoal.jobs.read import parse_job
from shoal.models import build
from tests.fuzz.mutate import bounded, mutated, tries

SOUND: list[dict[str, Any]] = [
    {
        "model": {"name": "gpt", "vocab_size": 16, "sequence": 4, "layers": 2, "d_model": 8, "heads": 2},
        "train": {
            "steps": 3, "global_batch": 4, "microbatch": 2, "precision": precision,
            "optimizer": {"name": "sgd", "momentum": 0.9}, "lr": 1e-3, "weight_decay": 0.1,
            "schedule": "cosine", "warmup": 3, "clip": 1.0, "seed": 0, "sync_bn": False,
        },
        "plan": {
            "dp": 1, "pp": 1, "zero": zero, "exchange": exchange, "recompute": recompute, "memory": memory,
            "schedule": "1f1b", "context": "ulysses",
        },
    }
    for precision, zero, exchange, recompute, memory in (
        (
            "fp32", 0, {"name": "allreduce", "chunk_bytes": 65536}, {"name": "blocks", "every": 2},
            {"device": "1GiB", "host": "2GiB"},
        ),
        ({"name": "fp16", "hysteresis": 1}, 0, {"name": "diloco"}, {"name": "selective", "save": ["matmul"]}, None),
        ({"name": "bf16", "master": "kahan"}, 0, "powersgd", {"name": "budget", "keep": 0.5}, {"device": 0.5}),
    )
]  # fmt: skip


def one_key_mutated(draw: random.Random) -> dict[str, Any]:
    content = draw.choice(SOUND)
    section = draw.choice(["train", "plan"])
    rest = dict(content[section])
    key = draw.choice(list(rest))
    changed = mutated({key: rest.pop(key)}, draw)
    return {**content, section: {**rest, **(changed if isinstance(changed, dict) else {})}}


@pytest.mark.parametrize(
    "number", [pytest.param(40, id="part"), pytest.param(2000, id="whole", marks=pytest.mark.matrix)]
)
def test_engines(number: int) -> None:
    def attempt(draw: random.Random) -> None:
        content = one_key_mutated(draw)
        with bounded(content), suppress(ShoalError), warnings.catch_warnings(action="ignore"):
            job, _ = parse_job(content)
            made(job)

    tries(number, 7, attempt)


def made(job: Job) -> None:
    microbatches_of(job)
    model = build(job.model)
    train = replace(job.train, schedule=job.train.schedule or "cosine", warmup=job.train.warmup or 0)
    make_engine(replace(job, train=train), model, 3, World.single("cpu")).close()
