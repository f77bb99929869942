"""One loop as its owner writes it: through the doors on several ranks, and in plain torch on all of their data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal import initialize_engine
from shoal.comm import World
from tests.pool import apart

INPUTS, HIDDEN, OUTPUTS, MICROBATCH = 12, 24, 4, 8


class Net(nn.Module):
    """Returns the loss, as models of PatrickStar's examples do."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(INPUTS, HIDDEN)
        self.body = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
        self.outward = nn.Linear(HIDDEN, OUTPUTS)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out = self.outward(self.body(torch.tanh(self.inward(batch["x"])))) * self.scale
        return (out - batch["y"]).square().mean()


class Normed(Net):
    """The same with BatchNorm, of each microbatch, in it; and so large, and registered in such an order, that chunks
    may be cut anew after the first step."""

    def __init__(self) -> None:
        super().__init__()
        wide, first, second = 16_000, self.inward, self.body
        self.outward = nn.Sequential(
            nn.Linear(HIDDEN, wide, bias=False), nn.BatchNorm1d(wide), nn.Linear(wide, OUTPUTS)
        )
        del self.inward, self.body
        self.body, self.inward = second, first  # registered last, though their gradients come last


def microbatch(step: int, rank: int, number: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    x = torch.randn(MICROBATCH, INPUTS, generator=draw)
    return {"x": x, "y": torch.stack([x[:, :3].sum(1), x[:, 3] * x[:, 4], x[:, 5], -x[:, 6]], 1)}


def through_the_door(
    world: World, config: Any, steps: int, hosts: bool = False, after: Callable | None = None, factory: Any = Net
) -> dict[str, Any]:
    """Trains; what each step said, and the weights before and after. `hosts`: as if each rank were on one of its
    own."""
    torch.manual_seed(5)
    model, optimizer = initialize_engine(factory, None, config, world=apart(world) if hosts else world)
    seen: dict[str, Any] = {
        "before": model.state_dict(),
        "losses": [],
        "norms": [],
        "scales": [],
        "skipped": [],
        "lrs": [],
    }
    try:
        for step in range(steps):
            for number in range(model.gradient_accumulation_steps()):
                seen["lrs"].append(optimizer.param_groups[0]["lr"])
                optimizer.zero_grad()
                loss = model(microbatch(step, world.rank, number))
                model.backward(loss)
                optimizer.step()
            result = model.result
            seen["losses"].append(result.loss)
            seen["norms"].append(result.grad_norm)
            seen["scales"].append(result.loss_scale)
            seen["skipped"].append(result.skipped)
        seen["after"] = model.state_dict()
        if after is not None:
            seen["more"] = after(model, optimizer)
        return seen
    finally:
        model.close()


def by_torch(
    before: dict[str, Tensor],
    make: Callable[[Any], torch.optim.Optimizer],
    steps: int,
    ranks: int = 1,
    microbatches: int = 1,
    clip: Callable[[list[Tensor]], Any] | None = None,
    lrs: list[float] | None = None,
    factory: Callable[[], nn.Module] = Net,
) -> dict[str, Any]:
    """The same in one process, gradients of all microbatches averaged. `lrs`: of each step."""
    model = factory()
    model.load_state_dict(before)
    optimizer, losses = make(model.parameters()), []
    for step in range(steps):
        if lrs is not None:
            optimizer.param_groups[0]["lr"] = lrs[step]
        optimizer.zero_grad()
        parts = [model(microbatch(step, rank, number)) for rank in range(ranks) for number in range(microbatches)]
        loss = torch.stack(parts).mean()
        loss.backward()
        if clip is not None:
            clip(list(model.parameters()))
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "after": model.state_dict()}


def assert_alike(seen: dict[str, Any], expected: dict[str, Any], rtol: float = 2e-5) -> None:
    torch.testing.assert_close(torch.tensor(seen["losses"]), torch.tensor(expected["losses"]), rtol=rtol, atol=1e-7)
    for name, value in expected["after"].items():
        torch.testing.assert_close(
            seen["after"][name], value, rtol=rtol, atol=rtol / 10, msg=lambda text, name=name: f"{name}: {text}"
        )
