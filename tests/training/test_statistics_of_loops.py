"""Running statistics in a loop of the caller's, whose forwards need no gradients, or whose BatchNorm is frozen."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shoal import Engine, Plan, UserError
from shoal.comm import World
from shoal.comm.simulation import simulate_world
from shoal.training.loop import callers_loss

pytestmark = pytest.mark.fast
RANKS, STEPS = 2, 3


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def freeze(model: nn.Module, how: str) -> None:
    """`weights`: they do not learn; `all`: statistics stand still, too."""
    if how:
        model[1].requires_grad_(False)
    if how == "all":
        model[1].eval()


def microbatch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))
    return x, x[:, :1] * x[:, 1:2]


def on_ranks(world: World, frozen: str, again: bool) -> dict[str, Tensor]:
    running = Engine(
        net, callers_loss, partial(torch.optim.SGD, lr=0.1), Plan(dp=world.size), global_batch=4 * world.size,
        microbatch=4, world=world,
    )  # fmt: skip
    loop = running.loop()
    for step in range(STEPS):
        running.module.train()
        freeze(running.module, frozen)
        x, y = microbatch(world.rank, step)
        loss = (loop(x) - y).square().mean()
        if again:
            with torch.no_grad():
                loop(2 * x)
        loop.backward(loss)
        loop.step()
        running.module.eval()
        with torch.no_grad():
            loop(5 * x)  # leaves nothing behind
    found = {name: value.detach().clone() for name, value in running.module.state_dict().items()}
    running.close()
    return found


def on_one(frozen: str, again: bool) -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        freeze(model, frozen)
        for rank in range(RANKS):
            x, y = microbatch(rank, step)
            ((model(x) - y).square().mean() / RANKS).backward()
            if again:
                with torch.no_grad():
                    model(2 * x)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("again", [False, True], ids=["", "again"])
@pytest.mark.parametrize("frozen", ["", "weights", "all"])
def test_statistics_are_those_of_one_device(frozen, again):
    wanted = on_one(frozen, again)
    for found in simulate_world(RANKS, on_ranks, frozen, again):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=partial("{}: {}".format, name))


def between_steps(world: World) -> None:
    running = Engine(
        net, callers_loss, partial(torch.optim.SGD, lr=0.1), Plan(dp=world.size), global_batch=4 * world.size,
        microbatch=4, world=world,
    )  # fmt: skip
    loop = running.loop()
    running.module.train()
    try:
        with torch.no_grad():
            loop(microbatch(0, 0)[0])
    finally:
        running.close()


def test_a_forward_between_steps_writes_no_statistics():
    """Ranks would have different ones from there on."""
    with pytest.raises(UserError, match=r"would change the running statistics of 1.*call model.eval\(\)"):
        simulate_world(RANKS, between_steps)
    simulate_world(1, between_steps)
