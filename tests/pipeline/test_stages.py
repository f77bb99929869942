"""Cutting a model into stages, what travels between them, and ranks that are late or gone."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal import Engine, Plan
from shoal.comm import World
from shoal.comm.simulation import simulate_world
from shoal.errors import UserError
from shoal.models import GPT, GPTConfig, ResNet, ResNetConfig, from_config
from shoal.module.build import Built
from shoal.pipeline import Split, read_schedule, runner, stages_of, units_of, write_schedule
from shoal.pipeline.arrived import Box
from shoal.pipeline.find_routes import find_routes
from shoal.pipeline.p2p import AHEAD, Mail
from shoal.pipeline.schedules import make_schedule
from shoal.pipeline.split_backward import input_half, weight_half
from tests.pool import RankError, disposable_ranks, reference, run_ranks

SGD = partial(torch.optim.SGD, lr=0.1)
WIDTH = 8


def layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Skips(nn.Module):
    """What the first layer gives is used once more by the last one; a mask is made of what goes in; the second layer's
    result is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = layer(), layer(), layer(), layer()

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).to(x.dtype)
        first = self.first(x)
        second = F.relu_(self.second(first) + mask)
        return self.last(self.third(second).tanh_() * mask + first)


class Several(nn.Module):
    """A block that gives a tuple with something that is no tensor, and whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()

    def forward(self, x: Tensor, *, scale: float) -> tuple[Tensor, str, dict[str, Tensor]]:
        y = self.inner(x) * scale
        return y.tanh(), "kept", {"signs": (y > 0).long()}


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Several() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        signs = torch.zeros_like(x, dtype=torch.long)
        for block in self.blocks:
            x, word, more = block(x, scale=1.5)
            assert word == "kept"
            signs = signs + more["signs"]
        return x * signs


class Reads(Skips):
    """Its way depends on what the first layer gives."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.second(h) if h.sum() > 0 else self.third(h))


class Hiding(nn.Module):
    def __init__(self, how: Any) -> None:
        super().__init__()
        self.inner, self.how = layer(), how

    def forward(self, x: Tensor) -> Any:
        return self.how(self.inner(x))


class Hides(nn.Module):
    """A part gives an object of which torch does not know that it has tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Hiding(lambda y: SimpleNamespace(y=y)), layer()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x).y)


class Complex(Hides):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].how = lambda y: torch.complex(y, y)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x).abs())


class Backwards(nn.Module):
    """Its parts are defined the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = layer(), layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Loose(nn.Module):
    """It has parameters beside blocks: one is used where the first stage ends, one by the last stage alone. And a
    module that has one beside another module, around no block."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.token = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.embedding, self.head = Biased(), layer()
        self.blocks = nn.ModuleList(layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x.to(next(self.parameters()).device)) + self.token
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x) * self.scale


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, self.inner = nn.Parameter(torch.ones(WIDTH)), layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.bias


class Twice(nn.Module):
    """Two layers share a weight, and the first of them is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.layers[0](x))
        for each in self.layers[1:]:
            x = each(x).tanh()
        return x


class Partly(nn.Module):
    """It calls the first two of its layers alone, as a model of images and text does with text."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(6))

    def forward(self, x: Tensor, pictures: Tensor | None = None) -> Tensor:
        x = self.layers[1](self.layers[0](x).tanh())
        if pictures is not None:
            for each in self.layers[2:]:
                x = x + each(pictures)
        return x


class Energy(nn.Module):
    """Moves its input along the gradient of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()

    def forward(self, x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(self.inner(x).tanh().square().sum(), x, create_graph=True)
        return x - force


class Energies(nn.Module):
    """`between`: takes one more derivative, of all of its blocks."""

    def __init__(self, between: bool = False) -> None:
        super().__init__()
        self.blocks, self.between = nn.ModuleList([layer(), Energy(), Energy(), layer()]), between

    def forward(self, x: Tensor) -> Tensor:
        y = x = x.requires_grad_() if self.between else x
        for block in self.blocks:
            y = block(y)
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0] if self.between else y


def squares(model: nn.Module, mb: dict[str, Tensor]) -> Any:
    return (model(mb["x"]) - mb["y"]).square().sum(), mb["x"].shape[0]


def rows(number: int = 24) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(WIDTH, generator=draw), "y": torch.randn(WIDTH, generator=draw)} for _ in range(number)]


def train(world: World, model: Any, plan: dict[str, Any], steps: int = 4, **more: Any) -> list[float]:
    engine = Engine(
        model,
        squares,
        SGD,
        Plan(**plan),
        world=world,
        precision="fp64",
        clip=1.0,
        **{"global_batch": 12, "microbatch": 2, **more},
    )
    results = [engine.step(batch) for batch in engine.batches(rows(), steps=steps)]
    found = [number for result in results for number in (result.loss, result.grad_norm)]
    engine.close()
    return found


@pytest.mark.parametrize("model", [Skips, Chain, Twice, Backwards, Loose, Partly, Energies])
@pytest.mark.parametrize(
    "plan",
    [{"pp": 2}, {"pp": 4}, {"pp": 2, "schedule": "zbv"}, {"pp": 4, "schedule": "zb1p"}, {"pp": 2, "dp": 2, "zero": 2}],
)
def test_any_model_is_cut_between_any_of_its_parts(model, plan):
    if model is Backwards and plan["pp"] * (2 if plan.get("schedule") == "zbv" else 1) > 2:
        return  # it has two parts
    one = reference(train, 1, model, {})[0]
    for found in run_ranks(train, Plan(**plan).size, model, plan):
        assert found == pytest.approx(one, rel=1e-12)


def with_adamw(world: World, plan: dict[str, Any]) -> dict[str, Tensor]:
    adamw = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.3)
    engine = Engine(Loose, squares, adamw, Plan(**plan), world=world, precision="fp64", global_batch=12, microbatch=2)
    for batch in engine.batches(rows(), steps=4):
        engine.step(batch)
    found = {name: engine.parameters[name].detach().clone() for name in ("scale", "token")}
    engine.close()
    return found


@pytest.mark.parametrize("plan", [{"pp": 2}, {"pp": 2, "dp": 2, "zero": 1}, {"pp": 2, "schedule": "2bw"}], ids=str)
def test_a_parameter_that_one_stage_uses_and_all_have_is_updated_alike_on_all(plan):
    found = run_ranks(with_adamw, Plan(**plan).size, plan)
    for name, value in found[0].items():
        assert all(torch.equal(value, each[name]) for each in found), name
    if "schedule" not in plan:
        for name, value in reference(with_adamw, 1, {})[0].items():
            torch.testing.assert_close(found[0][name], value, rtol=1e-9, atol=1e-12)


def decayed(model: nn.Module, mb: dict[str, Tensor]) -> Any:
    """A penalty by hand, of all weights that the loss can see."""
    total, count = squares(model, mb)
    return total + sum(each.square().sum() for each in model.parameters()), count


def device_of(model: nn.Module, mb: dict[str, Tensor]) -> Any:
    like, number = next(model.parameters()), sum(each.numel() for each in model.parameters())
    assert like.dtype == torch.float64 and like.device == mb["x"].device and number == 4 * (WIDTH + 1) * WIDTH
    return squares(model, {key: value.to(like.device, like.dtype) for key, value in mb.items()})


def by_attribute(model: Any, mb: dict[str, Tensor]) -> Any:
    total, count = squares(model, mb)
    return total + model.first.weight.square().sum(), count


class Read(Skips):
    """Its weights are there when it is built, as one of them is read."""

    def __init__(self) -> None:
        super().__init__()
        float(next(self.parameters()).sum())


def by_loss(world: World, loss: Any, plan: dict[str, Any], model: Any = Skips) -> Any:
    engine = Engine(model, loss, SGD, Plan(**plan), world=world, precision="fp64", global_batch=4, microbatch=2)
    try:
        return engine.step(next(iter(engine.batches(rows())))).loss
    except UserError as error:
        return str(error)
    finally:
        engine.close()


def test_a_loss_reads_devices_of_parameters_on_any_stage_and_computes_with_none():
    one = run_ranks(by_loss, 1, device_of, {})[0]
    assert run_ranks(by_loss, 2, device_of, {"pp": 2}) == pytest.approx([one] * 2, rel=1e-12)
    found = run_ranks(by_loss, 2, decayed, {"pp": 2})
    assert found[0] == found[1] and "computes with the parameter first.weight" in found[0]


def halving(model: nn.Module, mb: dict[str, Tensor]) -> Any:
    mb["x"].mul_(0.5)
    return squares(model, mb)


def test_a_loss_may_write_to_what_it_is_given():
    """The first forward of each shape, by which stages learn what travels, was given the same tensors."""
    one = run_ranks(by_loss, 1, halving, {})[0]
    assert run_ranks(by_loss, 2, halving, {"pp": 2}) == pytest.approx([one] * 2, rel=1e-12)


@pytest.mark.parametrize("model", [Skips, Read])
def test_a_loss_computes_with_no_weight_that_another_stage_has(model):
    found = run_ranks(by_loss, 2, by_attribute, {"pp": 2}, model)
    assert all("computes with the parameter first.weight" in each for each in found)


class Frozen(Skips):
    """Some of it is not trained."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names.split():
            getattr(self, name).requires_grad_(False)


@pytest.mark.parametrize("names", ["first second", "third last", "second"])
@pytest.mark.parametrize(
    "plan",
    [
        {"pp": 2},
        {"pp": 2, "schedule": "zbv"},
        {"pp": 2, "dp": 2, "zero": 2},
        {"pp": 2, "memory": {}},
        {"pp": 2, "dp": 2, "zero": 1},
    ],
)
def test_stages_in_which_nothing_is_trained(names, plan):
    model = partial(Frozen, names)
    one = reference(train, 1, model, {})[0]
    for found in run_ranks(train, Plan(**plan).size, model, plan):
        assert found == pytest.approx(one, rel=1e-12)


def test_a_stage_without_blocks_has_nothing_to_recompute():
    cut = {"pp": 2, "stages": [["embedding", "blocks.0", "blocks.1"], ["head"]], "recompute": "full"}
    one = run_ranks(train, 1, Embedded, {})[0]
    for found in run_ranks(train, 2, Embedded, cut):
        assert found == pytest.approx(one, rel=1e-12)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = layer(), nn.ModuleList(layer() for _ in range(2)), layer()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


def evaluated(world: World, plan: dict[str, Any]) -> float:
    engine = Engine(Skips, squares, SGD, Plan(**plan), world=world, precision="fp64", global_batch=4, microbatch=2)
    loss = engine.evaluate(rows(37)).loss
    engine.close()
    return loss


def test_stages_by_hand_and_from_a_file(tmp_path):
    one = reference(train, 1, Skips, {})[0]
    write_schedule(make_schedule("1f1b", 2, 8), tmp_path / "mine.txt")  # longer than the step
    halves = re.sub(r"B(\S+)", r"I\1 W\1", (tmp_path / "mine.txt").read_text())
    (tmp_path / "halves.txt").write_text(halves)
    for plan in (
        {"pp": 2, "stages": [3, 1]},
        {"pp": 2, "stages": [["first"], ["second", "third", "last"]]},
        {"pp": 2, "schedule": {"name": "file", "path": str(tmp_path / "mine.txt")}},
        {"pp": 2, "schedule": {"name": "file", "path": str(tmp_path / "halves.txt")}},
        {"pp": 2, "schedule": "gpipe"},
    ):
        assert run_ranks(train, 2, Skips, plan)[0] == pytest.approx(one, rel=1e-12)
    mine = {"pp": 2, "schedule": {"name": "file", "path": str(tmp_path / "mine.txt")}}
    losses = run_ranks(evaluated, 2, mine) + run_ranks(evaluated, 1, {})  # of more microbatches than are in the file
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-12)
    naive = {"global_batch": 12, "microbatch": 12}  # one after the other
    alone = run_ranks(partial(train, **naive), 1, Skips, {})[0]
    assert run_ranks(partial(train, **naive), 2, Skips, {"pp": 2})[0] == pytest.approx(alone, rel=1e-12)


def ragged(world: World, plan: dict[str, Any]) -> list[float]:
    """Each sample of its own length: microbatches of one sample have shapes of their own."""
    data = [
        {"input_ids": torch.arange(length) % 61, "labels": torch.arange(length) % 61}
        for length in (5, 9, 5, 12, 7, 9, 3, 5)
    ]
    model = partial(GPT, GPTConfig(61, 12, 2, 16, 2))

    def loss(model: nn.Module, mb: dict[str, Tensor]) -> Any:
        return F.cross_entropy(model(mb["input_ids"]).flatten(0, 1), mb["labels"].flatten(), reduction="sum"), mb[
            "labels"
        ].numel()

    engine = Engine(model, loss, SGD, Plan(**plan), world=world, precision="fp64", global_batch=4, microbatch=1)
    found = [engine.step(batch).loss for batch in engine.batches(data, steps=4)]
    engine.close()
    return found


def test_shapes_of_microbatches_may_differ():
    one = run_ranks(ragged, 1, {})[0]
    assert run_ranks(ragged, 2, {"pp": 2, "schedule": "zb1p"})[0] == pytest.approx(one, rel=1e-12)


def test_blocks_are_shared_out_by_their_work():
    units = units_of(GPT(GPTConfig(61, 12, 6, 16, 2)))
    assert [unit.name for unit in units if not unit.is_block] == [
        "token_embedding",
        "position_embedding",
        "norm",
        "head",
    ]
    large = units_of(GPT(GPTConfig(2 * 12 * 16, 12, 6, 16, 2)))  # a head as heavy as two blocks
    assert stages_of(units, 2) == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert stages_of(large, 2).count(0) - 2 == 4  # embeddings are looked up, and weigh nothing
    images = units_of(ResNet(ResNetConfig(20, 5)))
    assert [unit.name for unit in images[:3]] == ["stem.0", "stem.1", "blocks.0"]


def test_models_of_transformers_come_in_the_order_of_their_plan():
    config = {
        "model_type": "llama",
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    names = [unit.name for unit in units_of(from_config(config)())]
    assert names == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.layers.2",
        "model.norm",
        "lm_head",
    ]


class Projected(nn.Module):
    """A base model whose plan leaves out a projection that its forward calls before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 8), nn.LayerNorm(8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.project = nn.Linear(8, 8)
        self.config = SimpleNamespace(base_model_pp_plan={"embed": (), "blocks": (), "norm": ()})

    def forward(self, ids):
        h = self.project(self.embed(ids))
        for block in self.blocks:
            h = block(h)
        return self.norm(h)


class OutOfOrder(Projected):
    """Its source does not show what it calls first."""

    def forward(self, ids):
        last, calls = self.norm, [self.embed, self.project, *self.blocks]
        for call in calls:
            ids = call(ids)
        return last(ids)


def test_a_plan_of_transformers_decides_only_where_the_source_contradicts_it():
    def names(model):
        model.__dict__["base_model"] = model  # as a property, not as a child
        return [unit.name for unit in units_of(model)]

    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert names(Projected()) == ["embed", "project", *blocks, "norm"]
    assert names(OutOfOrder()) == ["embed", *blocks, "norm", "project"]


@pytest.mark.parametrize(
    ("model", "plan", "more", "message"),
    [
        (Skips, {"pp": 8}, {}, "plan.pp: a model of 4 blocks has no 8 stages"),
        (Reads, {"pp": 4}, {}, "reads, outside its parts, the value of something that another stage computes"),
        (
            Skips,
            {"pp": 2, "stages": [["third", "last"], ["first", "second"]]},
            {},
            "stage 0 .* through|does not call before",
        ),
        (Skips, {"pp": 2, "stages": [2, 1]}, {}, "the model has 4 blocks"),
        (Skips, {"pp": 2, "stages": [["first"], ["second", "third"]]}, {}, "gives last to no stage"),
        (
            Skips,
            {"pp": 2, "stages": [["first", "lost"], ["second", "third", "last"]]},
            {},
            '"lost" is no part of the model. Did you mean "last"',
        ),
        (
            Skips,
            {"pp": 2, "stages": [["first"], ["first", "second", "third", "last"]]},
            {},
            r"gives first to the stages \[0, 1\]",
        ),
        (Skips, {"pp": 2, "stages": [1, 1, 2]}, {}, "names 3 stages, the schedule has 2"),
        (Skips, {"pp": 2, "schedule": "1f2b"}, {}, 'plan.schedule = "1f2b" is none of'),
        (Skips, {"pp": 2, "schedule": {"name": "1f1b", "chunks": 2}}, {}, "takes 1 chunk a rank"),
        (Skips, {"pp": 2, "schedule": {"name": "1f1b", "chunk": 2}}, {}, "no parameter chunk"),
        (Skips, {"pp": 2, "schedule": {"name": "file"}}, {}, "takes path"),
        (Hides, {"pp": 2}, {}, "blocks.0 gives a SimpleNamespace, in which tensors are not found"),
        (Complex, {"pp": 2}, {}, "blocks.0 gives complex numbers to stage 1"),
        (Skips, {"pp": 2, "dp": 2, "exchange": "diloco"}, {}, "diloco.* does not go with plan.pp"),
    ],
)
def test_what_cannot_be_cut_is_said(model, plan, more, message):
    with pytest.raises(RankError, match=message):
        run_ranks(train, Plan(**plan).size, model, plan)


def outside(world: World) -> None:
    engine = Engine(Skips, squares, SGD, Plan(pp=2), world=world, global_batch=4, microbatch=2)
    try:
        for call, message in (
            (lambda: engine.module(torch.zeros(2, WIDTH)), "was called outside a step"),
            (lambda: engine.objective(next(engine.batches(rows()))), "no rank has all parameters"),
            (lambda: engine.loop(), "train with engine.step"),
        ):
            with pytest.raises(UserError, match=message):
                call()
    finally:
        engine.close()


def test_what_no_rank_can_do_alone_is_refused():
    run_ranks(outside, 2)


def halved(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    box = Box(x)
    grads, starts = input_half([model(box.tensor).square().sum()], [None], [box])
    assert all(parameter.grad is None for parameter in model.parameters())
    weight_half(starts)
    assert grads[0] is not None
    return grads[0], {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize(
    "model", [Skips, Chain, Twice, partial(nn.LSTMCell, WIDTH, WIDTH), partial(nn.Conv1d, 3, 3, 3, padding=1)]
)
def test_halves_of_a_backward_are_the_whole(model):
    torch.manual_seed(0)
    module = model().double()
    forward = module if not isinstance(module, nn.LSTMCell) else Cell(module)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    own = x.clone().requires_grad_()
    forward(own).square().sum().backward()
    whole = {name: parameter.grad for name, parameter in forward.named_parameters() if parameter.grad is not None}
    for parameter in forward.parameters():
        parameter.grad = None
    of_input, of_weights = halved(forward, x)
    torch.testing.assert_close(of_input, own.grad)
    assert of_weights.keys() == whole.keys()
    for name, grad in whole.items():
        torch.testing.assert_close(of_weights[name], grad)


class Cell(nn.Module):
    def __init__(self, cell: nn.LSTMCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Conditioned(nn.Module):
    """What is made of no input is given to the next stages too, above and below another such thing."""

    def __init__(self) -> None:
        super().__init__()
        self.condition, self.second, self.block = layer(), layer(), layer()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = self.condition(torch.ones(WIDTH, dtype=x.dtype))
        second = self.second(first.tanh())
        return self.block(x + first) * second, first, second


class Normed(nn.Module):
    """A norm that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), layer()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.norm(self.linear(self.norm(x))),)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.T, x.T @ grads[0]


class ByFunction(nn.Module):
    """Weights go into an autograd.Function, one of them into a plain operation too, above and below."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.often = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (Product.apply(Product.apply(x @ self.often, self.once), self.often.tanh()) @ self.often,)


@pytest.mark.parametrize("model", [Conditioned, Normed, ByFunction])
def test_halves_are_the_whole_wherever_weights_are_used(model):
    torch.manual_seed(0)
    module, seen = model().double(), {}
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.setdefault(name, []).append(grad.clone()))
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    roots = module(x.clone().requires_grad_())
    grads = [torch.randn_like(root) for root in roots]
    torch.autograd.backward(roots, grads)
    whole = {name: parameter.grad for name, parameter in module.named_parameters()}
    hooked, seen = dict(seen), {}
    for parameter in module.parameters():
        parameter.grad = None
    box = Box(x)
    _, starts = input_half(module(box.tensor), grads, [box])
    weight_half(starts)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name])
        torch.testing.assert_close(seen[name], hooked[name])


def test_a_value_from_another_stage_is_held_by_who_uses_it_alone():
    gc.collect()
    gc.disable()
    try:
        box = Box(torch.randn(WIDTH))
        (box.tensor * 2).sum().backward()
        kept = [weakref.ref(each) for each in (box, box.tensor, box.grad)]
        del box
        assert [each() for each in kept] == [None] * 3
    finally:
        gc.enable()


def test_a_hook_on_a_weight_sees_the_sum_of_its_gradients_once():
    model, seen = Transposed(), []
    model.weight.register_hook(seen.append)
    x = torch.randn(3, WIDTH)
    _, grads = halved(model, x)
    (grad,) = seen
    torch.testing.assert_close(grads["weight"], grad)
    model(x).square().sum().backward()
    torch.testing.assert_close(seen[1], grad)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() @ self.weight.t()


def recorded(world: World, schedule: str) -> tuple[list[str], int, int]:
    """The actions of a step beside an evaluation; how often the way of microbatches was looked for, and how many
    messages were asked for at a time."""
    looks, posted = 0, 0
    look, receive = runner.find_routes, Mail.receive

    def looked(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        return look(*args)

    def received(self: Mail, *args: Any) -> Any:
        nonlocal posted
        found = receive(self, *args)
        posted = max(posted, len(self._posted))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "find_routes", looked)
        patch.setattr(Mail, "receive", received)
        engine = Engine(
            Skips,
            squares,
            SGD,
            Plan(pp=2, schedule=schedule),
            world=world,
            precision="fp64",
            global_batch=12,
            microbatch=2,
        )
        (batch,) = engine.batches(rows(), steps=1)
        engine.ledger.recording = True
        engine.step(batch)
        step_looks = looks
        engine.evaluate(rows(6))
        spans = [span.name for span in engine.ledger.take() if span.lane == "stage"]
        engine.close()
    return spans, step_looks, posted


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb1p", "zbv"])
def test_each_action_is_recorded(schedule):
    """Also the half of the first stage's backward in which nothing is to be done."""
    found = run_ranks(recorded, 2, schedule)
    assert [spans for spans, _, _ in found] == [
        [str(each) for each in order] for order in make_schedule(schedule, 2, 6).orders
    ]
    assert [looks for _, looks, _ in found] == [1, 1]  # all microbatches are alike
    assert all(posted <= AHEAD * (1 if schedule in ("1f1b", "zb1p") else 2) for _, _, posted in found)


def test_only_what_is_needed_travels():
    """Skips in four stages: the first layer's result goes on to the second and to the last one, and the mask, made of
    the rows, to nobody."""
    model = Skips()
    units = units_of(model)
    world, x, stages = World.single(), torch.randn(2, WIDTH), stages_of(units, 4)
    split = Split(Built(model, lambda name, tensor: tensor, "given"), units, stages, range(4))
    routes = find_routes(split, 4, lambda stage: 0, world.everyone, lambda: model(x), x.device)
    travel = {pair: [units[value.unit].name for value in routes.between(*pair)] for pair in routes.pairs()}
    assert travel == {(0, 1): ["first"], (0, 3): ["first"], (1, 2): ["second"], (2, 3): ["third"]}


def test_a_schedule_from_a_file_is_cut_to_shorter_steps(tmp_path):
    write_schedule(make_schedule("zbv", 2, 6), tmp_path / "zbv.txt")
    schedule = read_schedule(tmp_path / "zbv.txt", 2, "v")
    assert schedule.of_first(2).microbatches == 2
    with pytest.raises(UserError, match="is of 6 microbatches, and this step has 7"):
        schedule.of_first(7)


def steps(world: World, note: str, die_at: int) -> None:
    engine = Engine(Skips, squares, SGD, Plan(pp=2), world=world, global_batch=12, microbatch=2)
    for batch in engine.batches(rows()):
        if world.rank == 1 and batch.step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.step(batch)
        Path(note).write_text(str(batch.step))


def test_a_killed_stage_is_named_and_nobody_hangs(tmp_path):
    started = time.monotonic()
    with disposable_ranks(steps, 2, str(tmp_path / "note"), 3) as ranks, pytest.raises(RankError) as caught:
        ranks[0].result()
    assert time.monotonic() - started < 60
    assert "stage 1" in str(caught.value) or "rank 1" in str(caught.value)


def slow(world: World) -> None:
    from datetime import timedelta

    late = World(world.rank, world.size, store=world.store, timeout=timedelta(seconds=3))
    engine = Engine(Late, squares, SGD, Plan(pp=2), world=late, global_batch=12, microbatch=2)
    for batch in engine.batches(rows(), steps=2):
        engine.step(batch)


class Late(Skips):
    """Its second half takes too long."""

    def __init__(self) -> None:
        super().__init__()
        self.third.register_forward_hook(lambda *_: time.sleep(8))


def test_a_slow_stage_is_named(tmp_path):
    with disposable_ranks(slow, 2) as ranks, pytest.raises(RankError, match=r"stage 1|timed out|group.s rank 1"):
        ranks[0].result(60)


class Checkpointed(Loose):
    """Its forward computes blocks again in backward, some of them together."""

    def __init__(self, reentrant: bool = False, together: int = 1) -> None:
        super().__init__()
        self.reentrant, self.together = reentrant, together

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) + self.token
        for first in range(0, len(self.blocks), self.together):
            x = checkpoint(self.run, first, x, use_reentrant=self.reentrant)
        return self.head(x) * self.scale

    def run(self, first: int, x: Tensor) -> Tensor:
        for block in self.blocks[first : first + self.together]:
            x = block(x).tanh()
        return x


@pytest.mark.parametrize(
    ("together", "plan"),
    [(1, {"pp": 2}), (1, {"pp": 2, "schedule": "zb1p"}), (4, {"pp": 2}), (4, {"pp": 2, "schedule": "zbv"})],
)
def test_a_model_may_compute_its_blocks_again(together, plan):
    one = reference(train, 1, Checkpointed, {})[0]
    for found in run_ranks(train, 2, partial(Checkpointed, together=together), plan):
        assert found == pytest.approx(one, rel=1e-12)


class Again(torch.autograd.Function):
    """Keeps of all blocks the input of the first alone, and runs them again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: nn.ModuleList) -> Tensor:
        ctx.save_for_backward(x)
        ctx.blocks = blocks
        return Again.through(x, blocks)

    @staticmethod
    def through(x: Tensor, blocks: nn.ModuleList) -> Tensor:
        for block in blocks:
            x = block(x).tanh()
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            Again.through(x, ctx.blocks).backward(grad)
        return x.grad, None


class Reversible(Loose):
    """As the layers of Reformer are."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Again.apply(self.embedding(x) + self.token, self.blocks)) * self.scale


def test_blocks_that_an_autograd_function_runs_may_lie_in_the_last_stage():
    one = reference(train, 1, Reversible, {})[0]
    for found in run_ranks(train, 2, Reversible, {"pp": 2, "stages": [["embedding"], ["blocks", "head"]]}):
        assert found == pytest.approx(one, rel=1e-12)


def refusal(world: World, model: Any) -> str:
    cut = {"pp": 3, "stages": [1, 1, 2]} if model is Chosen else {"pp": 2}
    with pytest.raises(UserError) as caught:
        train(world, model, cut, steps=1)
    return str(caught.value)


class Chosen(Loose):
    """How many rows its last blocks see depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.embedding(x) + self.token)
        for block in self.blocks[1:]:
            x = block(x[x.sum(1) > 0])
        return self.head(x).sum() * torch.ones_like(x)


class Compared(Skips):
    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.last(self.third(self.second(first))) if torch.equal(first, x) else self.last(self.third(first))


class Around(nn.Module):
    """A recurrence: all its layers, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for each in (*self.layers, *self.layers):
            x = each(x).tanh()
        return x


class Siamese(nn.Module):
    """Two inputs by the same layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = nn.Sequential(layer(), nn.Tanh(), layer(), layer()), layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tower(x) * self.tower(x.flip(1)))


def test_layers_that_are_called_again_train_in_one_stage_as_the_refusal_says():
    """It named the first of them alone, and not what else has to lie beside it."""
    found = run_ranks(refusal, 2, Siamese)
    assert re.search(r"tower.0 more than once.* \(tower.0, tower.2, tower.3, or what", found[0]), found
    named = {"pp": 2, "stages": [["tower.0", "tower.2", "tower.3"], ["head"]]}
    one = run_ranks(train, 1, Siamese, {})[0]
    assert run_ranks(train, 2, Siamese, named) == [pytest.approx(one, rel=1e-12)] * 2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (partial(Checkpointed, reentrant=True), 'plan.recompute = "full"'),
        (Reversible, "blocks.0 is called inside the forward of Again.* plan.pp = 1"),
        (Chosen, "shape .* depends on .* values"),
        (Compared, "reads, outside its parts, the value"),
        (partial(Energies, True), "takes derivatives between its parts .* plan.pp = 1"),
        (Around, "layers.0 more than once.* plan.pp = 1"),
    ],
)
def test_what_a_forward_does_between_parts_is_refused_alike_on_all_ranks(model, message):
    found = run_ranks(refusal, 3 if model is Chosen else 2, model)
    assert found[0] == found[1] and re.search(message, found[0]), found
    assert "Error:" not in found[0], "no text of torch"


def test_without_a_microbatch_a_pipeline_is_kept_busy():
    found = run_ranks(partial(train, microbatch=None, global_batch=24), 2, Skips, {"pp": 2})
    one = run_ranks(partial(train, microbatch=3, global_batch=24), 1, Skips, {})[0]
    assert found == [pytest.approx(one, rel=1e-12)] * 2
    assert run_ranks(chosen, 2) == [3, 3]


def chosen(world: World) -> int:
    engine = Engine(Skips, squares, SGD, Plan(pp=2), world=world, global_batch=24)
    engine.close()
    return engine.microbatch


class Long(nn.Module):
    """Blocks of which a budget holds a few."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def budgeted(world: World, plan: dict[str, Any]) -> list[float]:
    torch.set_num_threads(1)

    def loss(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
        return model(microbatch["x"]).square().sum(), len(microbatch["x"])

    sgd = partial(torch.optim.SGD, lr=0.01)
    small = Plan(exchange={"name": "allreduce", "chunk_bytes": 20_000}, **plan)
    engine = Engine(Long, loss, sgd, small, global_batch=8, microbatch=4, world=world)
    try:
        rows = [{"x": torch.full((64,), at / 16)} for at in range(16)]
        return [engine.step(batch).loss for batch in engine.batches(rows, steps=2)]
    finally:
        engine.close()


def test_what_is_tried_out_asks_for_no_more_weights_than_a_budget_holds():
    """Attributes that a trial puts back were told from views of weights, all of which came for that."""
    (one,) = simulate_world(1, budgeted, {})
    assert simulate_world(2, budgeted, {"pp": 2, "memory": {"device": "120KB"}})[0] == pytest.approx(one, rel=1e-5)
