"""A model that uses what is inside a part from outside of it: another stage may have that."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from shoal import Engine, Plan
from shoal.comm.simulation import simulate_world
from shoal.errors import UserError
from tests.pipeline.running import losses_of

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.rest = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(torch.tanh(self.up(x)))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.end(x)


class Weight(Base):
    """The head is tied by a call of a function on the weight of the first layer."""

    def end(self, x: Tensor) -> Tensor:
        return F.linear(x, self.first.weight)


class Buffer(Base):
    def end(self, x: Tensor) -> Tensor:
        return x * self.blocks[0].scale


class Inner(Base):
    def end(self, x: Tensor) -> Tensor:
        return self.blocks[0].rest[0](x)


class Described(Base):
    """Reads from another stage's part what it may: lengths, shapes, dtypes."""

    def end(self, x: Tensor) -> Tensor:
        inner = self.blocks[0].rest
        return x.to(inner[0].weight.dtype) / (len(inner) * inner[0].weight.shape[0] * self.blocks[0].scale.numel())


class Noted(Base):
    """Reads what its author has noted on a parameter of another stage's part."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.gain = 3.0  # type: ignore[assignment]

    def end(self, x: Tensor) -> Tensor:
        return x * getattr(self.first.weight, "gain", 1.0)


class Listed(Base):
    """Computes with parameters of modules that have no forward: a list, and one whose method is called."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(4))
        self.turn = Turn()

    def forward(self, x: Tensor) -> Tensor:
        x = self.turn.turned(self.first(x))
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = x + block(x) * scale
        return self.turn.turned(x)


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def turned(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Averaging(Base):
    """Keeps, in a buffer outside of all parts, a mean of what the first stage gives, which nothing else uses later."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        for block in self.blocks:
            x = block(x)
        return x


class Common(Base):
    """The last block has a layer of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].up = self.blocks[0].up

    def end(self, x: Tensor) -> Tensor:
        return x


class Relative(Base):
    """Blocks are given a table that is never called, as DeBERTa's are its relative positions; a convolution comes
    behind the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(2, WIDTH)
        self.shift = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions.weight.sum(0)
        x = self.first(x)
        for place, block in enumerate(self.blocks):
            x = x + block(x * positions)
            if place == 0 and self.training:
                x = self.shift(x)
        return x


class Packing(nn.Module):
    """Words of rows of any length, read by an LSTM that gives them packed."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.read, self.head = nn.Linear(WIDTH, WIDTH), Packed(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(pad_packed_sequence(self.read(self.words(x)), batch_first=True)[0][:, 0])


class Packed(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> PackedSequence:  # type: ignore[override]
        rows = pack_padded_sequence(x.unsqueeze(1), torch.ones(len(x), dtype=torch.int64), batch_first=True)
        packed: PackedSequence = super().forward(rows)[0]
        return packed


def squares(model: nn.Module, mb: Any) -> tuple[Tensor, Tensor]:
    return F.mse_loss(model(mb["x"]), mb["y"], reduction="sum"), torch.tensor(mb["x"].numel())


def trained(world: Any, make: Any, ready: bool, plan: dict[str, Any]) -> list[float]:
    draw = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(WIDTH, generator=draw), "y": torch.randn(WIDTH, generator=draw)} for _ in range(8)]
    return losses_of(world, ready_one(make) if ready else make, squares, rows, plan, 4)


def ready_one(make: Any) -> Any:
    """A module of the same numbers for every rank: ranks are threads here, which share torch's generator."""
    model, draw = make(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / WIDTH)
    return model


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Weight, "computes with the parameter first.weight"),
        (Buffer, "computes with the buffer blocks.0.scale"),
        (Inner, "blocks.0.rest.0 is called"),
    ],
)
def test_what_another_stage_has_is_not_computed_with(make: Any, message: str, ready: bool) -> None:
    with pytest.raises(UserError, match=message):
        simulate_world(2, trained, make, ready, {"pp": 2})


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("make", [Described, Noted, Listed, Common])
def test_what_another_stage_has_may_be_looked_at(make: Any, ready: bool, dp: int) -> None:
    """Replicas look at what modules keep, and of a ready module what another stage has lies on the meta device, but a
    layer that parts of both stages have in common."""
    one = simulate_world(1, trained, make, ready, {})[0]
    assert simulate_world(2 * dp, trained, make, ready, {"pp": 2, "dp": dp})[0] == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize("ready", [False, True])
def test_a_table_that_is_never_called_is_on_every_stage(ready: bool) -> None:
    one = simulate_world(1, trained, Relative, ready, {})[0]
    assert simulate_world(2, trained, Relative, ready, {"pp": 2})[0] == pytest.approx(one, rel=1e-6)


def test_an_object_that_looks_at_its_tensors_stays_in_the_last_stage() -> None:
    one = simulate_world(1, trained, Packing, True, {})[0]
    plan = {"pp": 2, "stages": [["words"], ["read", "head"]]}
    assert simulate_world(2, trained, Packing, True, plan)[0] == pytest.approx(one, rel=1e-6)
    with pytest.raises(UserError, match="read gives an object of a class that looks at the tensors"):
        simulate_world(2, trained, Packing, True, {"pp": 2, "stages": [["words", "read"], ["head"]]})


def mean_kept(world: Any, plan: dict[str, Any]) -> Any:
    rows = [{"x": torch.full((WIDTH,), float(place)), "y": torch.ones(WIDTH)} for place in range(4)]
    sgd = partial(torch.optim.SGD, lr=0.01)
    engine = Engine(ready_one(Averaging), squares, sgd, Plan(**plan), global_batch=4, microbatch=2, world=world)
    for batch in engine.batches(rows, steps=2):
        engine.step(batch)
    found = engine.weights_on_first()
    engine.close()
    return found.get("mean")


def test_a_buffer_outside_of_parts_takes_what_another_stage_gives() -> None:
    one, cut = simulate_world(1, mean_kept, {})[0], simulate_world(2, mean_kept, {"pp": 2})[0]
    torch.testing.assert_close(cut, one)
