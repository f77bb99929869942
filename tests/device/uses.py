"""What an engine does beside steps, on a device or on the CPU: each use returns numbers to compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shoal import Engine, Plan, initialize_engine
from shoal.comm import World
from shoal.errors import TrainingError
from shoal.models import GPT, GPTConfig, causal_lm
from tests.device.engines import world_of
from tests.device.simulator import Rank
from tests.doors.loops import Net, microbatch
from tests.parity.cases import text

CONFIG = GPTConfig(61, 12, 4, 32, 4)
GPT_OF_A_USE = partial(GPT, CONFIG)
OVERFLOWING = 8
Use = Callable[[World, str], list[float]]
"""Takes the ranks, and a folder that all of them see."""


def engine(world: World, plan: dict[str, Any] | None = None, optimizer: Any = None, **options: Any) -> Engine:
    return Engine(
        GPT_OF_A_USE,
        causal_lm,
        optimizer or partial(torch.optim.AdamW, lr=3e-3),
        Plan(**(plan or {"dp": world.size})),
        world=world,
        **{"global_batch": 12, "microbatch": 3, "clip": 0.8, **options},
    )


def on(running: Engine, until: int) -> list[float]:
    """The losses of the steps up to `until`."""
    return [running.step(batch).loss for batch in running.batches(text(), steps=until)]


def trained(world: World, until: int, plan: dict[str, Any] | None = None, **options: Any) -> list[float]:
    """The losses of an engine that is closed in the middle of what its exchange does in the background."""
    running = engine(world, plan, **options)
    losses = on(running, until)
    running.close()
    return losses


def evaluation(world: World, folder: str) -> list[float]:
    """Between steps, of which the ones behind it are the same."""
    running = engine(world)
    before, found = on(running, 2), running.evaluate(text())
    return [*before, found.loss, found.tokens, *on(running, 4)]


def generation(world: World, folder: str) -> list[float]:
    running = engine(world)
    on(running, 2)
    return list(map(float, running.generate(torch.tensor([[1, 2, 3]]), 6, temperature=0.0)[0].tolist()))


def plans_in_turn(world: World, folder: str) -> list[float]:
    """Goes on under other plans, in memory."""
    running = engine(world)
    losses = on(running, 1)
    size = world.size
    several = [{"dp": 2, "zero": 3, "memory": {}}, {"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 1}]
    for plan in several if size == 2 else [{"memory": {}}, {"recompute": "full"}, {}]:
        running.replan(Plan(**plan))
        losses += on(running, running.step_index + 1)
    return losses


def there_and_back(world: World, folder: str) -> list[float]:
    """Ranks on the CPU save, these go on and save, and ranks on the CPU go on."""
    host = World(world.rank, world.size, seat=None, store=world.store, device="cpu", generation=7)
    losses: list[float] = []
    for where, until in ((host, 2), (world, 4), (host, 6)):
        running = engine(where, {"dp": world.size, "zero": min(1, world.size - 1)})
        if until > 2:
            running.load(folder)
        losses += on(running, until)
        running.save(folder)
        running.close()
    return losses


def streamed(world: World, folder: str) -> list[float]:
    plan = {"dp": world.size, "zero": 3 * (world.size - 1), "memory": {"update": "streamed"}}
    return trained(world, 4, plan, precision="bf16")


def without_a_fused_kernel(world: World, folder: str) -> list[float]:
    return trained(world, 3, optimizer=partial(torch.optim.RMSprop, lr=1e-3))


def masters(keep: str, world: World, folder: str) -> list[float]:
    return trained(world, 4, precision={"name": "bf16", "master": keep})


def both_ways(schedule: str, world: World, folder: str) -> list[float]:
    """Stages of which two ranks send each other values forward."""
    return trained(world, 2, {"pp": 2, "schedule": schedule})


def exchanged(options: dict[str, Any], world: World, folder: str) -> list[float]:
    return trained(world, 4, {"dp": world.size, "exchange": options})


def not_finite(world: World, folder: str) -> list[float]:
    """A weight that is no number is told at the next call, on all ranks."""
    running = engine(world)
    on(running, 1)
    with torch.no_grad():
        next(iter(running.module.parameters())).fill_(float("nan"))
    try:
        on(running, 4)
    except TrainingError as error:
        return [float("weights already not finite" in str(error))]
    return []


def unflushed(plan: dict[str, Any], world: World, folder: str) -> list[float]:
    """2bw, whose stages share a weight; nobody reads before all is over."""
    running = engine(world, {**plan, "schedule": "2bw"})
    results = [running.step(batch) for batch in running.batches(text(), steps=6)]
    numbers = [number for result in results[1:] for number in (result.loss, result.grad_norm)]
    after = running.evaluate(text()).loss
    running.close()
    return [*numbers, after]


def left_unflushed(schedule: str, world: World, folder: str) -> list[float]:
    """An engine is closed while steps are under way, and another one trains."""
    one = 3 if schedule == "pipedream" else 12
    running = Engine(
        partial(GPT, replace(CONFIG, tied=schedule == "2bw")),
        causal_lm,
        partial(torch.optim.AdamW, lr=3e-3),
        Plan(pp=2, schedule=schedule),
        global_batch=one,
        microbatch=3,
        world=world,
    )
    results = [running.step(batch) for batch in running.batches(text(), steps=3)]
    running.close()
    return [*(result.loss for result in results), *trained(world, 2, {"pp": 2})]


def unflushed_that_diverges(world: World, folder: str) -> list[float]:
    """Is told, on all ranks."""
    running = engine(world, {"pp": 2, "schedule": "2bw"}, partial(torch.optim.SGD, lr=1e38))
    try:
        for batch in running.batches(text(), steps=8):
            running.step(batch)
    except TrainingError as error:
        return [float("is nan" in str(error))]
    finally:
        running.close()
    return []


def overflow(plan: dict[str, Any], world: World, folder: str) -> list[float]:
    """Steps in fp16 of which the first ones overflow and are skipped; nobody reads before all are over."""
    running = engine(world, plan, precision={"name": "fp16", "initial_scale_power": 24, "hysteresis": 1})
    results = [running.step(batch) for batch in running.batches(text(), steps=OVERFLOWING)]
    skipped = [float(result.skipped) for result in results]
    assert 0 < sum(skipped) < OVERFLOWING
    losses, scales = [result.loss for result in results], [result.loss_scale or 0.0 for result in results]
    running.close()
    return [*skipped, *scales, *losses]


def door(config: dict[str, Any], world: World, folder: str) -> list[float]:
    """A loop of PatrickStar or DeepSpeed, as `config` says."""
    torch.manual_seed(5)
    model, optimizer = initialize_engine(Net, None, config, world=world)
    losses = []
    for step in range(4):
        for number in range(model.gradient_accumulation_steps()):
            optimizer.zero_grad()
            batch = {key: value.to(world.device) for key, value in microbatch(step, world.rank, number).items()}
            loss = model(batch)
            model.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses).tolist()  # not before: the host would have waited


def used(rank: Rank, where: str, use: Use) -> list[float]:
    """What `use` gives on ranks whose devices are `where`."""
    return use(world_of(rank, where), rank.folder)
