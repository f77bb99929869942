"""The examples of remote modules learn."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm import World
from shoal.server.remote import Owner
from tests.pool import run_ranks
from tests.server.common import ROOT, TOKEN

NAMES = ["split", "pipeline", "batched", "embedding", "rl"]


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / f"remote_{name}.py"))


@contextmanager
def owners(of: dict[str, Any], count: int) -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Owner(of["FACTORIES"], token=TOKEN)).address for _ in range(count)]


@pytest.mark.parametrize(("name", "steps", "most"), [("split", 15, 0.75), ("pipeline", 10, 0.9), ("batched", 20, 0.9)])
def test_the_loss_falls(name, steps, most):
    of = example(name)
    with owners(of, 2) as addresses:
        losses = of["train"](addresses, TOKEN, steps)
    assert len(losses) == steps and losses[-1] < most * losses[0]


def test_microbatches_in_flight_learn_as_one_does():
    of = example("pipeline")
    with owners(of, 2) as addresses:
        one, four = (of["train"](addresses, TOKEN, 3, microbatches) for microbatches in (1, 4))
    assert one == pytest.approx(four, rel=1e-4)


def test_requests_of_all_trainers_are_one_batch():
    of = example("batched")
    with Owner(of["FACTORIES"], token=TOKEN) as owner:
        of["train"]([owner.address], TOKEN, 4)
        (entry,) = owner._registry._entries.values()
        assert entry.exposed.module.batches == 4


def embedding(world: World, address: str, steps: int) -> list[float]:
    torch.set_num_threads(1)
    return example("embedding")["train"](world, address, TOKEN, steps)


def test_ranks_that_share_a_table_learn_as_one_does():
    of, losses = example("embedding"), []
    for size in (1, 2):
        with owners(of, 1) as (address,):
            losses += run_ranks(embedding, size, address, 25)
    assert losses[0] == pytest.approx(losses[1], abs=2e-3) and losses[1] == losses[2]
    assert losses[0][-1] < 0.95 * losses[0][0]


def test_an_agent_learns_from_observers_that_call_its_policy():
    pytest.importorskip("gymnasium")
    of = example("rl")
    with owners(of, 2) as addresses:
        lengths = of["train"](addresses, TOKEN, 14)
    assert sum(lengths[-4:]) > 1.3 * sum(lengths[:4])


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_one_command(name):
    if name == "rl":
        pytest.importorskip("gymnasium")
    path = Path(ROOT / "examples" / f"remote_{name}.py")
    done = subprocess.run([sys.executable, path], env=dict(os.environ), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "before" in done.stdout or "at first" in done.stdout
    assert not done.stderr.strip()
