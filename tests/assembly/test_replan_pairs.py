"""A change of the plan meets the other features of an engine: gradients, loss scales, buffers, workers, loops."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from shoal import Engine, Plan
from shoal.comm import World
from shoal.data import BalancedCursor
from shoal.errors import UserError
from shoal.models import regression
from tests.assembly.test_replan import PLANS, _both, _steps, assert_same
from tests.parity.cases import engine, vectors
from tests.pool import run_ranks

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def by_layer(norms: Mapping[str, float]) -> dict[str, float]:
    """Clips each parameter by itself."""
    return {name: min(1.0, 0.1 / (norm + 1e-6)) for name, norm in norms.items()}


OVERFLOWS = {"name": "fp16", "initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 1}


@pytest.mark.parametrize(
    ("case", "precision", "old", "new", "more"),
    [
        ("gpt-deep", "fp32", "zero3", "tp2", {"accumulation": 3}),  # the step after the change is short
        ("gpt-deep", "fp32", "tp2-zero3", "pp2", {"accumulation": 3, "norms_every": 1}),
        ("gpt-deep", "fp32", "dp", "zero3", {"clip": by_layer, "keep_gradients": True}),
        ("gpt-deep", "fp32", "hybrid", "zero1", {"clip": None, "clip_value": 1e-3}),
        ("gpt", OVERFLOWS, "dp", "zero2", {}),
        ("gpt", OVERFLOWS, "zero3", "tp2", {"accumulation": 3}),
    ],
)
def test_what_a_step_does_with_gradients(tmp_path, case, precision, old, new, more):
    ranks = partial(_both, **more)
    assert_same(run_ranks(ranks, 4, case, precision, PLANS[old], PLANS[new], str(tmp_path)), tmp_path)


# buffers that forwards write


class Tracked(nn.Module):
    """BatchNorm, a moving average, and a buffer that the forward reads, which has no rule."""

    def __init__(self, codebook: bool) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.register_buffer("mean", torch.zeros(16))
        self.codebook = codebook
        if codebook:
            self.register_buffer("code", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.inner(x)).tanh()
        if self.training:
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            if self.codebook:
                self.code.copy_(torch.where(self.code > 0, self.code * 0.9 + 0.1 * h.detach().mean(0), self.code))
        return self.outer(h * self.code if self.codebook else h)


def _tracked(world, codebook: bool, directory: str, plans: list[dict[str, Any]]) -> Any:
    """Buffers and losses of a run through all `plans`, of one that is loaded at each, and of one under the first."""
    data, found = vectors()[:40], []  # no batch of one sample, of which there are no statistics
    how = {"buffers": "averaged"} if codebook else {}
    made = partial(
        Engine, partial(Tracked, codebook), regression, SGD, global_batch=8, microbatch=2, world=world, **how
    )
    for kind in ("goes on", "loaded", "stays"):
        running = made(plan=Plan(**plans[0]))
        losses = _steps(running, data, 2)
        for number, plan in enumerate(plans[1:]):
            if kind == "goes on":
                running.replan(Plan(**plan))
            elif kind == "loaded":
                running.save(f"{directory}/{number}")
                running.close()
                world.everyone.barrier()
                running = made(plan=Plan(**plan))
                running.load(f"{directory}/{number}")
            losses += _steps(running, data, 2)
        found.append((losses, {name: value.clone() for name, value in running.module.named_buffers()}))
        running.close()
    return found


@pytest.mark.parametrize("codebook", [False, True])
def test_buffers_that_forwards_write(tmp_path, codebook):
    plans: list[dict[str, Any]] = [{"dp": 2, "zero": stage} for stage in (0, 3, 1, 0, 0)]
    first, second = run_ranks(_tracked, 2, codebook, str(tmp_path), plans)
    for (losses, buffers), (same, theirs) in zip(first, second, strict=True):
        assert losses == same and all(torch.equal(value, theirs[name]) for name, value in buffers.items())
    (losses, buffers), (loaded, theirs), (expected, plain) = first
    assert losses == loaded and losses == pytest.approx(expected, rel=1e-6)
    for name, value in buffers.items():
        assert torch.equal(value, theirs[name]), name
        torch.testing.assert_close(value, plain[name], rtol=1e-5, atol=1e-6, msg=name)


# what is read, and comes, later


def _later(world) -> None:
    """A result that is read after the change, a rate that was changed by hand, an order of samples of the caller's."""
    data = vectors()
    made = partial(engine, "auxiliary", "fp64", 3, world=world, schedule=None, norms_every=1, keep_gradients=True)
    running, twin = made(plan=Plan(dp=2)), made(plan=Plan(dp=2))
    cursor = partial(BalancedCursor, [1 + sample % 5 for sample in range(len(data))], 12, 0)
    ours, theirs = (each.batches(data, cursor=cursor(), steps=6) for each in (running, twin))
    for number, (batch, other) in enumerate(zip(ours, theirs, strict=True)):
        mine, its = running.step(batch), twin.step(other)
        if number in (1, 3):
            for each in (running, twin):
                each.optimizer.torch.param_groups[0]["lr"] *= 0.5
            running.replan(Plan(dp=2, zero=3 - number // 2))
            with pytest.raises(UserError, match="no gradients are kept"):
                running.gradients()
        assert mine.loss == pytest.approx(its.loss, rel=1e-12) and mine.lr == its.lr and batch.ids == other.ids
        assert mine.norms == pytest.approx(its.norms, rel=1e-9) and mine.grad_norm == pytest.approx(its.grad_norm)
    assert running.evaluate(data, max_batches=1).loss != running.evaluate(data).loss
    running.close(), twin.close()


def test_results_rates_and_the_order_of_samples():
    run_ranks(_later, 2)


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
