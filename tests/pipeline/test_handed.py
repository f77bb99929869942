"""What parts of a pipeline change in the lists, dicts and objects that they are given."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.simulation import simulate_world
from shoal.errors import UserError
from tests.pipeline.running import losses_of

WIDTH = 8


class Adds(nn.Module):
    """Adds to a list, and to a dict in a tuple; counts its calls in an object, and leaves a tensor there."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, sizes: list[Tensor], inside: tuple[dict[str, Any]], *, state: Any) -> Tensor:
        y = self.product(x + inside[0].get("sum", 0.0)).tanh()
        sizes.append(y.square().mean())
        inside[0]["sum"] = inside[0].get("sum", 0.0) + 0.5 * y
        inside[0].setdefault("all", []).append(y)
        state.number += 1
        state.last = y * state.number
        return y


class Model(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adds() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        sizes, inside, state = list[Tensor](), dict[str, Any](), SimpleNamespace(number=0)
        for block in self.blocks:
            x = block(x, sizes, (inside,), state=state)
        assert len(sizes) == len(inside["all"]) == state.number == len(self.blocks)
        return x + sum(sizes) + inside["sum"] + inside["all"][0] + state.last


def squares(model: nn.Module, mb: Any) -> tuple[Tensor, Tensor]:
    return (model(mb["x"]) - mb["y"]).square().sum(), torch.tensor(mb["x"].numel())


def losses(world: Any, plan: dict[str, Any], model: Any = Model) -> list[float]:
    draw = torch.Generator().manual_seed(1)
    rows = [{key: torch.randn(WIDTH, generator=draw) for key in ("x", "y")} for _ in range(16)]
    return losses_of(world, model, squares, rows, plan, 8)


@pytest.mark.parametrize("plan", [{"pp": 2}, {"pp": 2, "schedule": "zbv"}, {"pp": 2, "recompute": "full"}], ids=str)
def test_what_blocks_add_to_arguments_is_there_in_all_stages(plan: dict[str, Any]) -> None:
    """A later stage computed without what blocks of an earlier one had put into a dict, and the loss was wrong."""
    whole = simulate_world(1, losses, {})[0]
    for each in simulate_world(2, losses, plan):
        assert each == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_what_blocks_add_to_arguments_is_there_where_they_are_computed_again(recompute: str) -> None:
    """Blocks put it into copies, and the model went on without it; backward would put it there once more."""
    whole, again = (simulate_world(1, losses, plan)[0] for plan in ({}, {"recompute": recompute}))
    assert again == pytest.approx(whole, rel=1e-6)


class Begins(Adds):
    """Makes the list to which it adds, where there is nothing yet."""

    def forward(self, x: Tensor, *_: Any, state: Any) -> Tensor:
        y = self.product(x).tanh()
        state.aux = [] if state.aux is None else state.aux
        state.aux.append(y.square().mean())
        return y


class Beginning(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Begins() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        state = SimpleNamespace(aux=None)
        for block in self.blocks:
            x = block(x, state=state)
        return x + sum(state.aux)


def test_a_list_that_a_block_puts_where_there_was_nothing_is_there_in_all_stages() -> None:
    whole = simulate_world(1, partial(losses, model=Beginning), {})[0]
    for each in simulate_world(2, partial(losses, model=Beginning), {"pp": 2}):
        assert each == pytest.approx(whole, rel=1e-5)


class Takes(Adds):
    def forward(self, x: Tensor, sizes: list[Tensor], inside: tuple[dict[str, Any]], *, state: Any) -> Tensor:
        inside[0].pop("sum", None)
        return self.product(x)


class Taking(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Takes()


def test_a_block_that_takes_something_out_is_refused_in_stages() -> None:
    """Later stages would find it there."""
    with pytest.raises(UserError, match=r"blocks.1 takes something out of a list, .* or take plan.pp = 1"):
        simulate_world(2, partial(losses, model=Taking), {"pp": 2})
