"""Several engines in one process: each trains as it does alone, in whatever order they are made, stepped and closed."""

from __future__ import annotations

import math
import runpy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm import World
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.models import GPT, GPTConfig, causal_lm
from shoal.plan import Plan
from shoal.training.loop import callers_loss
from tests.parity.cases import text
from tests.pool import run_ranks

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
LAYERS = (2, 3)
ROWS = text()[:40]  # batches of eight that are alike: what is compiled once is not again


def make(world: World, plan: dict[str, Any], layers: int) -> Engine:
    model = partial(GPT, GPTConfig(vocab_size=61, sequence=12, layers=layers, d_model=16, heads=2, dropout=0.1))
    plan = {"dp": world.size, **plan}
    return Engine(model, causal_lm, ADAMW, Plan(**plan), global_batch=8, microbatch=2, world=world, seed=layers)


def one_by_one(world: World, plan: dict[str, Any]) -> list[list[float]]:
    found = []
    for layers in LAYERS:
        running = make(world, plan, layers)
        found.append(
            [running.step(batch).loss for batch in running.batches(ROWS, steps=4)] + [running.evaluate(ROWS).loss]
        )
        running.close()
    return found


def in_turn(world: World, plan: dict[str, Any]) -> list[list[float]]:
    """A step of one, a step of the other; the first one made is closed first, while the other goes on."""
    engines = [make(world, plan, layers) for layers in LAYERS]
    batches = [iter(each.batches(ROWS)) for each in engines]
    results = [[], []]
    for _ in range(4):
        for place, running in enumerate(engines):
            results[place].append(running.step(next(batches[place])))
    found = [[each.loss for each in theirs] for theirs in results]
    for place, running in enumerate(engines):
        found[place].append(running.evaluate(ROWS).loss)
        running.close()
    return found


PLANS: list[dict[str, Any]] = [
    {},
    {"zero": 1},
    {"zero": 3, "recompute": "full"},
    {"exchange": "powersgd"},
    {"exchange": {"name": "diloco", "every": 2}},
    {"exchange": {"name": "delayed", "delay": 2}},
    {"dp": 1, "tp": 2},
    {"dp": 1, "pp": 2},
    {"dp": 1, "pp": 2, "schedule": "2bw"},
    {"memory": {"update": "deferred"}},
    {"compile": "aot_eager"},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_two_engines_in_turn_are_each_as_alone(plan):
    assert run_ranks(in_turn, 2, plan) == run_ranks(one_by_one, 2, plan)


def averaging(world: World, exchange: dict[str, Any]) -> list[float]:
    """Losses of two engines after training in turn, whose replicas average in the background; the first one ends while
    the other goes on."""
    torch.set_num_threads(1)
    engines = [make(world, {"exchange": exchange}, layers) for layers in (2, 4)]
    streams = [iter(each.batches(text())) for each in engines]
    found = []
    for _ in range(12):
        for running, batches in zip(engines, streams, strict=True):
            running.step(next(batches))
    for place, running in enumerate(engines):
        running.settle()
        found.append(running.evaluate(text()).loss)
        if place == 0:
            running.close()
            for _ in range(4):
                engines[1].step(next(streams[1]))
    engines[1].close()
    return found


@pytest.mark.parametrize("interval", [0, 5])
def test_two_engines_that_average_in_the_background(interval):
    """Rounds depend on clocks, so bits do too; both learn, and their ranks agree."""
    untrained = math.log(61)
    for losses in (ranks := run_ranks(averaging, 2, {"name": "async_average", "interval_ms": interval})):
        assert all(loss < untrained - 0.05 for loss in losses) and losses == ranks[0]


def example(world: World, name: str, steps: int) -> dict[str, float]:
    torch.set_num_threads(1)
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    return runpy.run_path(str(path))["train"](world, steps)


@pytest.mark.parametrize(("name", "what", "most"), [("gan", "off", 0.6), ("distil", "loss", 1.0)])
def test_examples_of_two_models_give_the_same_on_one_and_on_two_ranks(name, what, most):
    (one,) = run_ranks(example, 1, name, 60)
    for found in run_ranks(example, 2, name, 60):
        assert found == pytest.approx(one, rel=0.02, abs=0.01), "fp32 over 60 steps"
    assert one[what] < most


def stray(world: World, touches: bool) -> list[Any]:
    """Trains one model through another, whose parameters then get gradients that are none of its steps'."""
    first = make(world, {"zero": 2}, 2)

    def through(model: Any, mb: dict[str, torch.Tensor]) -> Any:
        logits = model(mb["input_ids"])
        if touches:
            more = first.module(mb["input_ids"])
            return (logits + more).square().sum(), logits.numel()
        return logits.square().sum(), logits.numel()

    second = Engine(partial(torch.nn.Embedding, 61, 61), through, ADAMW, global_batch=8, microbatch=2, world=world)
    losses = []
    for batch in first.batches(text(), steps=4):
        losses.append(first.step(batch).loss)
        second.step(next(second.batches(text())))
    first.close()
    second.close()
    return losses


def test_gradients_from_another_engines_loss_are_none_of_its_steps():
    assert run_ranks(stray, 2, True) == run_ranks(stray, 2, False)


def _two_loops(world, interleaved: bool) -> list[list[float]]:
    """Two models of one shape whose gradients are on their way at the same time, or one after the other."""
    made = partial(Engine, optimizer=partial(torch.optim.SGD, lr=0.1), global_batch=4, precision="fp64", world=world)
    engines = [
        made(partial(torch.nn.Linear, 200, 200), loss=lambda model, mb: (model(mb).sum(), 1), seed=seed)
        for seed in (0, 1)
    ]
    loops = [engine.loop(1) for engine in engines]
    draw = torch.Generator().manual_seed(world.rank)
    for _ in range(20):
        rows = [torch.randn(4, 200, generator=draw, dtype=torch.float64) for _ in loops]
        if interleaved:
            losses = [loop(row).square().mean() for loop, row in zip(loops, rows, strict=True)]
            for loop, loss in zip(loops, losses, strict=True):
                loop.backward(loss)
            for loop in loops:
                loop.step()
        else:
            for loop, row in zip(loops, rows, strict=True):
                loop.backward(loop(row).square().mean())
                loop.step()
    found = [[value.double().sum().item() for value in engine.parameters.values()] for engine in engines]
    for engine in engines:
        engine.close()
    return found


def test_gradients_of_two_models_may_be_on_their_way_at_once():
    mixed, apart = run_ranks(_two_loops, 2, True), run_ranks(_two_loops, 2, False)
    assert mixed == apart and mixed[0] == mixed[1]


def _adversaries(world: World) -> list[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Two models that train through each other in loops of the caller's: the engines' weights, and those by torch."""
    torch.set_num_threads(1)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
    made = partial(Engine, optimizer=sgd, global_batch=4, world=world)
    engines = [made(partial(torch.nn.Linear, *sizes), callers_loss) for sizes in ((4, 1), (3, 4))]
    plain = [torch.nn.Linear(4, 1), torch.nn.Linear(3, 4)]
    for module, engine in zip(plain, engines, strict=True):
        module.load_state_dict({name: value.detach().clone() for name, value in engine.parameters.items()})
    optimizers = [sgd(module.parameters()) for module in plain]
    judge, maker = (engine.loop() for engine in engines)
    draw = torch.Generator().manual_seed(0)

    def losses(judge: Any, maker: Any, real: torch.Tensor, noise: torch.Tensor) -> Iterator[torch.Tensor]:
        yield (judge(real) - 1).square().mean() + judge(maker(noise).detach()).square().mean()
        yield (judge(maker(noise)) - 1).square().mean()

    for _ in range(4):
        given = torch.randn(4, 4, generator=draw), torch.randn(4, 3, generator=draw)
        for loop, loss in zip((judge, maker), losses(judge, maker, *given), strict=True):
            loop.backward(loss)
            loop.step()
        for optimizer, loss in zip(optimizers, losses(*plain, *given), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = [
        {name: (engine.parameters[name].detach().clone(), value.detach()) for name, value in module.named_parameters()}
        for engine, module in zip(engines, plain, strict=True)
    ]
    for engine in engines:
        engine.close()
    return found


def test_what_one_loop_sends_into_the_other_is_none_of_its_steps():
    """It was added to the gradients of the step that the forward had opened there."""
    for found in _adversaries(World.single("cpu")):
        for ours, theirs in found.values():
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_backward_of_the_callers_own_in_the_middle_of_a_step_is_refused():
    """Its gradients came in the unit of sums, whatever they were divided by."""

    def loss(model: torch.nn.Module, mb: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        model.weight.square().sum().backward()
        return model(mb["x"]).square().sum(), 1

    engine = Engine(partial(torch.nn.Linear, 3, 3), loss, ADAMW, global_batch=2)
    with pytest.raises(UserError, match=r"a backward reached weight that is not the step's own: add its loss"):
        engine.step(next(engine.batches([{"x": torch.ones(3)}] * 2)))
    engine = Engine(partial(torch.nn.Linear, 3, 3), callers_loss, ADAMW, global_batch=2)
    loop = engine.loop()
    out = loop(torch.ones(2, 3))
    with pytest.raises(UserError, match=r"or given to loop.backward\(...\)"):
        out.square().mean().backward()
    loop.backward(loop(torch.ones(2, 3)).square().mean())
    assert loop.step() is not None
