"""Several measures of one evaluation come from the same forwards; what evaluations and steps say of their time."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal import Engine, Plan
from shoal.comm import World
from shoal.comm.simulation import simulate_world
from shoal.training import evaluation
from tests.pool import run_ranks

SAMPLES = [{"x": torch.randn(3, generator=torch.Generator().manual_seed(i))} for i in range(13)]
SGD = partial(torch.optim.SGD, lr=0.1)
calls: list[int] = []


class Counting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        calls.append(len(x))
        return super().forward(x)


def square(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch["x"]).square().sum(), torch.tensor(float(len(batch["x"])))


def negative(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    output = model(batch["x"])
    return (output < 0).sum().float(), torch.tensor(float(output.numel()))


def spoiling(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch["x"]).abs_().sum(), torch.tensor(float(len(batch["x"])))


def taking(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Takes what it needs out of the batch and writes to it, as losses of transformers do with labels."""
    x = batch.pop("x")
    found = model(x).sum()
    return found + x.neg_().sum(), torch.tensor(float(len(x)))


def evaluated(world, plan: dict[str, Any]) -> list[tuple[float, ...]]:
    """(loss, further measures ..., forwards here) of an evaluation without, with one and with two of them; before these
    the measures alone."""

    def model() -> nn.Module:
        return nn.Sequential(Counting(3, 3), Counting(3, 3)) if "pp" in plan else Counting(3, 3)

    engine = Engine(model, square, SGD, Plan(**plan), global_batch=4, world=world)
    alone = tuple(engine.evaluate(SAMPLES, measure=each).loss for each in (square, negative, spoiling, taking))
    found = [alone]
    for measures in ((), (negative,), (spoiling, negative), (taking, negative)):
        calls.clear()
        together = engine.evaluate(SAMPLES, also=measures)
        found.append((together.loss, *together.also, float(len(calls))))
    engine.close()
    return found


@pytest.mark.parametrize("plan", [{"dp": 2}, {"dp": 2, "zero": 3}, {"pp": 2}], ids=str)
def test_measures_taken_in_one_pass_are_those_taken_alone(plan):
    for (loss, share, size, sums), one, two, three, four in run_ranks(evaluated, 2, plan):
        assert one[:1] == (loss,) and two[:2] == (loss, share) and four[:3] == (loss, sums, share)
        assert one[-1] == two[-1] == four[-1]
        assert three[:3] == (loss, size, share)
        # a forward more where a measure has written to what the model gave, but of a pipeline's, which give copies
        assert three[-1] == (1 if "pp" in plan else 2) * one[-1]


@pytest.mark.parametrize(("every", "lines"), [(3600.0, 0), (0.0, 4)])
def test_a_long_evaluation_says_how_far_it_is(every, lines, caplog, monkeypatch):
    monkeypatch.setattr(evaluation, "TELL", every)
    running = Engine(lambda: nn.Linear(3, 2), square, SGD, global_batch=8, microbatch=4)
    with caplog.at_level("INFO"):
        found = running.evaluate(SAMPLES)
    said = [each.message for each in caplog.records]
    assert len(said) == lines and said[-1:] == ["evaluating: 3 of 4 microbatches"][:lines]
    assert 0 < found.seconds < 60


@pytest.mark.parametrize("plan", [Plan(), Plan(pp=2, schedule="2bw")])
def test_a_step_says_how_long_it_took(plan):
    for seconds, wall in run_ranks(_timed, plan.size, plan):
        assert 0 < seconds <= wall


def _timed(world: World, plan: Plan) -> tuple[float, float]:
    running = Engine(
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), square, SGD, plan,
        global_batch=8, microbatch=2, world=world,
    )  # fmt: skip
    batch = next(running.batches(SAMPLES))
    started = time.perf_counter()
    result = running.step(batch)
    wall = time.perf_counter() - started
    running.close()
    return result.seconds, wall


class Seen(nn.Linear):
    """Counts its forwards, in any mode."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = 0.5 * self.last + x.detach().mean(0)
        return super().forward(x)


def buffers_of_ranks(world: World) -> tuple[int, list[float]]:
    plan = Plan(dp=world.size)
    engine = Engine(Seen, square, SGD, plan, global_batch=4, microbatch=1, world=world)
    for batch in engine.batches(SAMPLES, steps=3):
        engine.step(batch)
        engine.evaluate(SAMPLES[:5])
    engine.close()
    return int(engine.module.count), engine.module.last.tolist()


def test_an_evaluation_leaves_buffers_as_they_are():
    """Ranks of two have more or fewer of its microbatches, after which their buffers differed."""
    (alone,) = simulate_world(1, buffers_of_ranks)
    for count, last in simulate_world(2, buffers_of_ranks):
        assert count == alone[0] == 12
        assert last == pytest.approx(alone[1], rel=1e-5)
