"""A change of the plan meets the other features of an engine: accumulation, clipping, workers, loops that join."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from shoal import Engine, Plan
from shoal.comm import World
from shoal.errors import UserError
from shoal.models import regression
from tests.assembly.test_replan import PLANS, _both, assert_same
from tests.parity.cases import engine, vectors
from tests.pool import run_ranks

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def by_layer(norms: Mapping[str, float]) -> dict[str, float]:
    """Clips each parameter by itself."""
    return {name: min(1.0, 0.1 / (norm + 1e-6)) for name, norm in norms.items()}


@pytest.mark.parametrize(
    ("case", "old", "new", "more"),
    [
        ("gpt-deep", "zero3", "tp2", {"accumulation": 3}),  # the step after the change is short
        ("gpt-deep", "tp2-zero3", "pp2", {"accumulation": 3, "norms_every": 1}),
        ("gpt-deep", "dp", "zero3", {"clip": by_layer, "keep_gradients": True}),
        ("gpt-deep", "hybrid", "zero1", {"clip": None, "clip_value": 1e-3}),
    ],
)
def test_what_a_step_does_with_gradients(tmp_path, case, old, new, more):
    ranks = partial(_both, **more)
    assert_same(run_ranks(ranks, 4, case, "fp32", PLANS[old], PLANS[new], str(tmp_path)), tmp_path)


# what comes later


class Numbers(IterableDataset):
    """Samples without an index and without a place that can be saved."""

    def __iter__(self):
        samples = vectors()
        return iter(samples * 3)


def test_workers_that_read_ahead_go_on():
    losses = []
    for change in (True, False):
        running = engine("auxiliary", "fp64", 1, plan=Plan(), world=World.single("cpu"))
        loader = DataLoader(Numbers(), batch_size=None, num_workers=1)
        losses.append([])
        for batch in running.batches(loader, steps=6):
            losses[-1].append(running.step(batch).loss)
            if change and batch.step in (1, 3):
                running.replan(Plan(memory={}) if batch.step == 1 else Plan())
        running.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def _joined(world) -> None:
    """A loop in which ranks have unequal numbers of microbatches, before and after a change."""
    data = vectors()
    made = partial(
        Engine, partial(nn.Linear, 10, 3), regression, SGD, Plan(dp=2), global_batch=4, precision="fp64", world=world
    )
    running, twin = made(), made()
    for number in range(2):
        for each in (running, twin):
            loop = each.loop(1)
            with loop.join():
                for place in range(2 + world.rank):
                    sample = data[4 * number + 2 * place + world.rank]
                    loop.backward((loop(sample["inputs"][None]) - sample["targets"]).square().mean())
                    loop.step()
                if each is running:
                    with pytest.raises(UserError, match=r"inside loop\.join"):
                        each.replan(Plan(dp=2, zero=1))
        running.replan(Plan(dp=2, zero=1 + number))
    assert running.step_index == twin.step_index == 6
    for name, value in twin.parameters.items():
        torch.testing.assert_close(running.parameters[name], value, rtol=1e-12, atol=1e-14)
    running.close(), twin.close()


def test_a_loop_that_joins_ends_before_the_plan_changes():
    run_ranks(_joined, 2)
