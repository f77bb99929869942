"""What parts of a pipeline, and the loss, find elsewhere than among arguments and results: as attributes of modules."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Engine, Plan
from shoal.comm.simulation import simulate_world
from shoal.errors import TrainingError, UserError
from shoal.module.stand_in import StandIn
from tests.pipeline.running import losses_of

WIDTH = 8
STAGES = {"pp": 3, "stages": [1, 1, 1]}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)
        self.beside: list[Tensor] = []
        self.size: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x + sum(self.beside))
        self.size = y.square().mean()
        return y


class Three(nn.Module):
    """`skips`: the first block's result is also added to the third one's input, by way of an attribute."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.blocks, self.skips = nn.ModuleList(Layer() for _ in range(3)), skips

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        x = first(x)
        third.beside = [x] if self.skips else []
        return third(second(x))


class Cache:
    """What torch takes for a constant, although it holds a tensor."""

    def __init__(self, value: Tensor) -> None:
        self.layers = [SimpleNamespace(value=value)]


class Cached(Layer):
    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        return super().forward(x if cache is None else x + cache.layers[0].value)


class Prefixed(nn.Module):
    """The first block's result comes to the third one inside an object, as keys and values of prefix tuning do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Cached() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        cache = Cache(first(x))
        return third(second(x), cache)


class Counting(nn.Module):
    """The first block gives a number with its result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counted() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        x, total = first(x)
        return second(x * total)[0]


class Counted(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), float(x.detach().sum())


def squares(model: nn.Module, mb: Any) -> tuple[Tensor, Tensor]:
    return F.mse_loss(model(mb["x"]), mb["y"], reduction="sum"), torch.tensor(mb["x"].numel())


def with_sizes(model: nn.Module, mb: Any) -> tuple[Tensor, Tensor]:
    total, count = squares(model, mb)
    return total + model.blocks[0].size + sum(each.size for each in model.modules() if isinstance(each, Layer)), count


def with_weights(model: nn.Module, mb: Any) -> tuple[Tensor, Tensor]:
    total, count = squares(model, mb)
    return total + sum(each.weight.norm() for each in model.modules() if isinstance(each, nn.Linear)), count


def rows() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [{name: torch.randn(WIDTH, generator=draw) for name in "xy"} for _ in range(16)]


def losses(world: Any, loss: Any, plan: dict[str, Any]) -> list[float]:
    return losses_of(world, partial(Three, True), loss, rows(), plan, 8)


def changing(world: Any) -> None:
    """The path to the third block is there from the second step on."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = Engine(partial(Three, False), squares, sgd, Plan(**STAGES), global_batch=8, microbatch=4, world=world)
    batches = engine.batches(rows(), steps=2)
    try:
        engine.step(next(batches))
        engine.module.skips = True
        engine.step(next(batches))
    finally:
        engine.close()


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
def test_tensors_that_lie_on_modules_travel(schedule: str) -> None:
    """The forward puts one on a part, and parts leave theirs for the loss."""
    (alone,) = simulate_world(1, losses, with_sizes, {})
    for found in simulate_world(3, losses, with_sizes, {**STAGES, "schedule": schedule}):
        assert found == pytest.approx(alone, rel=1e-5)


class Collects(nn.Module):
    """Leaves a number in a list of its own, in a dict, and in a list of the model."""

    def __init__(self, common: list[Tensor]) -> None:
        super().__init__()
        self.product, self.boxes = nn.Linear(WIDTH, WIDTH), [common]
        self.own: list[Tensor] = []
        self.named: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        size = y.square().mean()
        self.own, self.named["of"] = [size], {"size": size}
        self.boxes[0].append(size)
        return y


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[Tensor] = []
        self.blocks = nn.ModuleList(Collects(self.sizes) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.clear()
        for block in self.blocks:
            x = block(x)
        return x


def with_lists(model: nn.Module, mb: Any) -> tuple[Tensor, Tensor]:
    total, count = squares(model, mb)
    of_blocks = [each for block in model.blocks for each in (*block.own, block.named["of"]["size"])]
    return total + sum(model.sizes) + 2 * sum(of_blocks), count


def collected(world: Any, plan: dict[str, Any]) -> list[float]:
    return losses_of(world, Collecting, with_lists, rows(), plan, 8)


@pytest.mark.parametrize("plan", [STAGES, {"tp": 2}])
def test_tensors_that_lie_in_lists_travel(plan: dict[str, Any]) -> None:
    """The loss had those of the last stage alone; under tp the engine ended in a KeyError."""
    (alone,) = simulate_world(1, collected, {})
    for found in simulate_world(3 if plan is STAGES else 2, collected, plan):
        assert found == pytest.approx(alone, rel=1e-5)


def prefixed(world: Any, plan: dict[str, Any]) -> list[float]:
    return losses_of(world, Prefixed, squares, rows(), plan, 8)


def test_a_tensor_travels_to_a_part_that_is_given_it_inside_an_object() -> None:
    """It was not found there, and the loss was no number."""
    (alone,) = simulate_world(1, prefixed, {})
    for found in simulate_world(3, prefixed, STAGES):
        assert found == pytest.approx(alone, rel=1e-5)


def test_a_loss_finds_layers_by_their_class_and_computes_with_no_weight() -> None:
    """It found none, and so no penalty."""
    with pytest.raises(UserError, match=r"computes with the parameter blocks.0.product.weight"):
        simulate_world(3, losses, with_weights, STAGES)


def counted(world: Any) -> list[float]:
    return losses_of(world, Counting, squares, rows(), {"pp": 2}, 8)


def test_a_number_that_a_part_gives_other_stages_is_the_same_each_time() -> None:
    """They had that of the first microbatch."""
    with pytest.raises(
        UserError, match=r"blocks.0 gives [-.\d]+, where of the first microbatch of these shapes it gave"
    ):
        simulate_world(2, counted)


def test_what_is_set_on_a_stand_in_is_set_on_its_part() -> None:
    part: Any = nn.Sequential(nn.Linear(2, 2))
    stand_in: Any = StandIn(part, part)
    stand_in.note = 3
    stand_in.eval()
    assert part.note == stand_in.note == 3 and not part[0].training and not stand_in.training
    stand_in.hold("weight", nn.Parameter(torch.zeros(2)))
    stand_in.weight = held = nn.Parameter(torch.ones(2))
    assert dict(stand_in.named_parameters()) == {"weight": held} and not hasattr(part, "weight")


def test_a_value_that_is_used_only_later_gives_no_wrong_loss() -> None:
    with pytest.raises(TrainingError, match=r"the loss is nan; .* \(\d of 6\)"):  # of all stages' parameters
        simulate_world(3, changing)


class Calls(Layer):
    """Multiplies by how often it was called. `anew`: the count is a new tensor each time."""

    def __init__(self, anew: bool) -> None:
        super().__init__()
        self.anew = anew
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.anew:
            self.calls = self.calls + 1
        else:
            self.calls += 1
        return super().forward(x) * self.calls


class OfCalls(Three):
    def __init__(self, anew: bool) -> None:
        super().__init__(False)
        self.blocks = nn.ModuleList(Calls(anew) for _ in range(3))


def of_calls(world: Any, plan: dict[str, Any], anew: bool) -> list[float]:
    return losses_of(world, partial(OfCalls, anew), squares, rows(), plan, 8)


def test_what_a_later_forward_changes_in_place_is_named_and_the_remedies_train() -> None:
    (alone,) = simulate_world(1, of_calls, {}, False)
    with pytest.raises(UserError, match=r"as by .* give the module a new tensor instead .* \(in B"):
        simulate_world(3, of_calls, STAGES, False)
    for plan, anew in ((STAGES, True), ({**STAGES, "recompute": "full"}, False)):
        assert all(found == pytest.approx(alone) for found in simulate_world(3, of_calls, plan, anew))
