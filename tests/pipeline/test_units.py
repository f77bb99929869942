"""Which modules are the parts of which stages consist."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Engine, Plan
from shoal.comm.simulation import simulate_world
from shoal.errors import UserError
from shoal.pipeline import stages_of, units_of
from shoal.pipeline.units import Unit


class NormAct(nn.BatchNorm1d):
    """A norm with modules in it that have no state."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.one = nn.Linear(4, 8), NormAct(8)
        self.more, self.two = nn.Linear(8, 8), NormAct(8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.two(self.more(self.one(self.up(x)))))


def squares(model: nn.Module, mb: Any) -> tuple[Tensor, Tensor]:
    return F.mse_loss(model(mb["x"]), mb["y"], reduction="sum"), torch.tensor(mb["x"].numel())


class Shifted(nn.Module):
    """A block, which shares the layer that it begins with."""

    def __init__(self, shift: nn.Module) -> None:
        super().__init__()
        self.shift, self.layer = shift, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(self.shift(x)))


class Shifts(nn.Module):
    """Two blocks share a layer that the model has too, and two another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.down = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList(Shifted(shift) for shift in (self.first, self.first, self.second, self.second))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.down(x)


def weights(world: Any, plan: dict[str, Any]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(4, generator=draw), "y": torch.randn(4, generator=draw)} for _ in range(8)]
    engine = Engine(Shifts, squares, partial(torch.optim.SGD, lr=0.1), Plan(**plan), global_batch=8, microbatch=4,
                    world=world)  # fmt: skip
    for batch in engine.batches(rows, steps=1):
        engine.step(batch)
    found = {name: each.detach().clone() for name, each in engine.module.named_parameters()}
    engine.close()
    return found


@pytest.mark.parametrize(
    "stages", [[2, 2], [1, 3], [["layers.0", "layers.1", "second"], ["layers.2", "layers.3", "first", "down"]]]
)
def test_a_layer_that_blocks_share_is_trained_as_in_one_process(stages: Any) -> None:
    """CoaT has its positions so: no stages held, for an IndexError."""
    assert [each.name for each in units_of(Shifts())] == [
        "layers.0", "first", "layers.1", "layers.2", "second", "layers.3", "down",
    ]  # fmt: skip
    (alone,), staged = simulate_world(1, weights, {}), simulate_world(2, weights, {"pp": 2, "stages": stages})
    found = {name: each for rank in staged for name, each in rank.items()}
    assert found.keys() >= {"first.weight", "second.weight", "layers.3.layer.weight"}
    assert all(torch.allclose(each, alone[name], atol=1e-7) for name, each in found.items())
    for rank in simulate_world(4, weights, {"pp": 2, "tp": 2, "stages": stages}):
        for name, each in rank.items():
            if name.endswith("layer.bias"):  # that of a row is whole on all ranks
                assert torch.allclose(each, alone[name], atol=1e-6), name


@pytest.mark.parametrize("cut", [[2.5, 1.5], [True, 3], [1, ["up"]], ["up", "down"], 3, []])
def test_a_cut_that_is_neither_numbers_nor_names_is_refused(cut: Any) -> None:
    with pytest.raises(UserError, match=r"plan.stages = .*: give a whole number of blocks for each stage"):
        stages_of(units_of(Layers()), 2, cut)


def statistics(world: Any, plan: dict[str, Any]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(4, generator=draw), "y": torch.randn(4, generator=draw)} for _ in range(8)]
    engine = Engine(Layers, squares, partial(torch.optim.SGD, lr=0.1), Plan(**plan), global_batch=8, microbatch=4,
                    world=world)  # fmt: skip
    for batch in engine.batches(rows, steps=1):
        engine.step(batch)
    found = {name: each.clone() for name, each in engine.module.named_buffers()}
    engine.close()
    return found


def test_a_module_with_stateless_modules_in_it_is_a_part() -> None:
    assert [unit.name for unit in units_of(Layers())] == ["up", "one", "more", "two", "down"]


def test_a_norm_with_its_activation_keeps_its_statistics_in_its_stage() -> None:
    one = simulate_world(1, statistics, {})[0]
    for own in simulate_world(2, statistics, {"pp": 2}):
        for name, value in own.items():
            torch.testing.assert_close(value, one[name])


def test_a_part_of_a_block_that_is_not_there_is_refused_with_the_blocks_there_are() -> None:
    units = units_of(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    lying = [Unit(f"blocks.{each.name}", each.module, each.work, each.is_block) for each in units]
    names = [each.name for each in lying]
    with pytest.raises(UserError, match=r'"blocks.3" is no part of the model\. There are blocks.0 to blocks.2\. Its'):
        stages_of(lying, 2, [names, ["blocks.3"]])


def test_fewer_blocks_than_stages_are_cut_by_names() -> None:
    """The refusal told of a smaller plan.pp alone."""
    parts = [Unit(name, nn.Linear(2, 2), 4, name == "block") for name in ("first", "block", "last")]
    with pytest.raises(UserError, match=r"1 blocks has no 2 stages .* name the parts of each stage .* there are 3"):
        stages_of(parts, 2)
    assert stages_of(parts, 2, [["first"], ["block", "last"]]) == [0, 1, 1]
    with pytest.raises(UserError, match=r"no 4 stages: take at most 1$"):
        stages_of(parts, 4)
