"""Hooks that users register on parameters, beside plain torch."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm import World
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.models import GPT, GPTConfig, causal_lm
from shoal.plan import Plan
from tests.pool import RankError, run_ranks

WORDS, SAMPLES, STEPS = 11, 12, 3
SGD = partial(torch.optim.SGD, lr=0.5)
MASK = (torch.arange(WORDS * 4).view(WORDS, 4) % 3 != 0).double()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Net(nn.Module):
    """An embedding, and blocks of which two share a weight, with hooks from the constructor on. `made` are their
    handles."""

    def __init__(self, before: dict[str, Any], after: dict[str, Any], sparse: bool = False) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, 4, sparse=sparse), nn.Linear(4, WORDS, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks[1].inner.weight = self.blocks[0].inner.weight
        self.made = register(self, before, after)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def register(module: nn.Module, before: dict[str, Any], after: dict[str, Any]) -> list[Any]:
    made = [module.get_parameter(name).register_hook(hook) for name, hook in before.items()]
    return made + [module.get_parameter(name).register_post_accumulate_grad_hook(hook) for name, hook in after.items()]


def data() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, WORDS, (6,), generator=draw) for _ in range(SAMPLES)]
    return [{"x": row[:-1], "y": torch.where(row[1:] % 5 == 0, -100, row[1:])} for row in rows]


def loss(model: nn.Module, mb: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Counts differ from microbatch to microbatch."""
    logits = model(mb["x"]).flatten(0, 1)
    return F.cross_entropy(logits, mb["y"].flatten(), reduction="sum"), (mb["y"] != -100).sum()


def clamp(gradient: Tensor) -> Tensor:
    """Not linear: its result depends on the unit."""
    return gradient.clamp(-0.01, 0.01)


def mask(gradient: Tensor) -> Tensor:
    masked = gradient.to_dense() * MASK.to(gradient.dtype)
    return masked.to_sparse(1) if gradient.is_sparse else masked


def mask_in_place(parameter: Tensor) -> None:
    if parameter.grad.is_sparse:
        parameter.grad = mask(parameter.grad)
    else:
        parameter.grad.mul_(MASK.to(parameter.grad.dtype))


def nothing(parameter: Tensor) -> None:
    parameter.grad = None


BEFORE = {"words.weight": mask, "blocks.0.inner.weight": clamp, "blocks.1.inner.bias": lambda gradient: gradient * 0}
AFTER = {"words.weight": mask_in_place, "out.weight": nothing}


def train(
    world: World, plan: dict[str, Any], late: bool = False, before: Any = BEFORE, after: Any = AFTER, **options: Any
) -> Any:
    """The weights after some steps of Shoal, with hooks of the constructor or `late` ones, on the engine's module."""
    sparse = options.pop("sparse", False)
    module = partial(Net, {}, {}, sparse) if late else partial(Net, before, after, sparse)
    options = {"global_batch": 8, "microbatch": 2, "precision": "fp64", **options}
    running = Engine(module, loss, SGD, Plan(**{"dp": world.size, **plan}), world=world, **options)
    if late:
        register(running.module, before, after)
    for batch in running.batches(data(), steps=STEPS):
        running.step(batch)
    with running.whole_weights():
        weights = {name: each.detach().clone() for name, each in running.parameters.items()}
    running.close()
    return weights


@cache
def plain(microbatch: int = 2, with_after: bool = True) -> dict[str, Tensor]:
    """The same by torch: a hook sees the gradient of each microbatch's mean, which counts by its share of the
    counts."""
    world = World.single(torch.device("cpu"))
    running = Engine(partial(Net, {}, {}), loss, SGD, global_batch=8, microbatch=2, precision="fp64", world=world)
    module = Net({}, {}).double()
    module.load_state_dict({name: each.detach().clone() for name, each in running.module.state_dict().items()})
    optimizer = SGD(module.parameters())

    def weigh(name: str, hook: Any, gradient: Tensor) -> Tensor:
        return hook(gradient / weight) * weight

    register(module, {name: partial(weigh, name, hook) for name, hook in BEFORE.items()}, AFTER if with_after else {})
    for batch in running.batches(data(), steps=STEPS):
        optimizer.zero_grad()
        pieces = [batch.load(batch.ids[i : i + microbatch]) for i in range(0, len(batch.ids), microbatch)]
        counts = [(piece["y"] != -100).sum() for piece in pieces]
        for piece, count in zip(pieces, counts, strict=True):
            weight = count.double() / sum(counts)
            (loss(module, piece)[0] / sum(counts)).backward()
        optimizer.step()
    running.close()
    return {name: each.detach() for name, each in module.named_parameters()}


def check(ranks: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for weights in ranks:
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "size, plan",
    [(1, {}), (2, {}), (3, {}), (2, {"zero": 1}), (1, {"recompute": "full", "compile": "aot_eager"})],
)
def test_hooks_do_what_they_do_in_plain_torch(size, plan, late):
    check(run_ranks(train, size, plan, late), plain())


@pytest.mark.parametrize(
    ("size", "plan"), [(2, {"zero": 2}), (2, {"zero": 3}), (1, {"memory": {"update": "deferred"}})]
)
def test_hooks_where_no_whole_gradient_is_kept(size, plan):
    check(run_ranks(partial(train, after={}), size, plan), plain(with_after=False))
    check(run_ranks(partial(train, microbatch=8 // size), size, plan), plain(8 // size))
    with pytest.raises(RankError, match=r"this plan keeps no whole sum of . microbatches: take register_hook"):
        run_ranks(train, size, plan)


def test_a_hook_that_leaves_the_sum_is_not_refused_on_several_ranks():
    seen = run_ranks(partial(train, after={"words.weight": mask_in_place}), 2, {})
    check(seen, run_ranks(partial(train, after={"words.weight": mask_in_place}), 1, {})[0])


def test_hooks_see_rows_of_sparse_embeddings():
    check(run_ranks(partial(train, sparse=True), 2, {}), plain())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", {"name": "bf16", "master": "split"}])
def test_hooks_see_the_gradient_of_the_mean_in_every_precision(precision):
    """Also where the loss is scaled; one that returns what it got changes nothing."""
    seen: dict[str, list[Tensor]] = {"before": [], "after": []}

    def before(gradient: Tensor) -> Tensor:
        seen["before"].append(gradient.clone())
        return gradient

    def after(parameter: Tensor) -> None:
        seen["after"].append(parameter.grad.clone())

    name, world = "out.weight", World.single(torch.device("cpu"))
    options = {"global_batch": 4, "microbatch": 2, "precision": precision, "world": world}
    running = Engine(partial(Net, {name: before}, {name: after}), loss, SGD, **options)
    module = Net({}, {})
    module.load_state_dict({name: each.detach().float() for name, each in running.module.state_dict().items()})
    batch = next(running.batches(data()))
    assert not running.step(batch).skipped
    running.close()
    parts = []
    for piece in (batch.load(batch.ids[:2]), batch.load(batch.ids[2:])):
        total, count = loss(module, piece)
        (gradient,) = torch.autograd.grad(total, module.get_parameter(name))
        parts.append((gradient, count))
    rounding = {"rtol": 1e-5, "atol": 1e-6} if precision == "fp32" else {"rtol": 0.03, "atol": 0.003}
    first, sum_of_first, second, sum_of_both = seen["before"][0], seen["after"][0], seen["before"][1], seen["after"][1]
    for found, (gradient, count) in (
        (first, parts[0]),
        (second, parts[1]),
        (sum_of_first, parts[0]),
        (sum_of_both, tuple(map(sum, zip(*parts, strict=True)))),
    ):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, gradient / count, **rounding)


def scaled(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


def gpt(name: str, hook: Any) -> GPT:
    model = GPT(GPTConfig(vocab_size=WORDS, sequence=8, layers=2, d_model=8, heads=2))
    model.get_parameter(name).register_hook(hook)
    return model


def refused(world: World, name: str, plan: dict[str, Any]) -> str:
    try:
        Engine(partial(gpt, name, clamp), causal_lm, SGD, Plan(dp=1, **plan), global_batch=4, microbatch=2, world=world)
    except UserError as error:
        return str(error)
    return ""


def test_hooks_that_a_plan_cannot_serve_are_refused_by_name():
    names = [
        name
        for name, _ in GPT(GPTConfig(vocab_size=WORDS, sequence=8, layers=2, d_model=8, heads=2)).named_parameters()
    ]
    matrix = next(name for name in names if "0" in name and name.endswith("weight") and "norm" not in name)
    for plan, why in (
        ({"pp": 2}, "only the last stage"),
        ({"tp": 2}, "a part of it"),
        ({"cp": 2}, "its part of the rows"),
    ):
        one, other = run_ranks(refused, 2, matrix, plan)
        assert one == other and one.startswith(f"{matrix} has a hook") and why in one
    with pytest.raises(RankError, match=r"changed the gradient, other than by zeros.*Take register_hook"):
        run_ranks(partial(train, after={"out.weight": scaled}), 2, {})
    run_ranks(partial(train, after={"out.weight": scaled}), 1, {})


def test_handles_of_hooks_remove_them():
    module = Net({"out.weight": clamp}, {"out.weight": nothing})
    running = Engine(module, loss, SGD, global_batch=4, microbatch=2, world=World.single(torch.device("cpu")))
    runs: list[int] = []
    late = running.module.out.weight.register_post_accumulate_grad_hook(lambda parameter: runs.append(1))
    batches = running.batches(data())
    before = running.module.out.weight.detach().clone()
    running.step(next(batches))
    assert torch.equal(before, running.module.out.weight) and len(runs) == 2
    for handle in (*module.made, late):
        handle.remove()
    running.step(next(batches))
    assert not torch.equal(before, running.module.out.weight) and len(runs) == 2
    running.close()


def test_hooks_in_a_loop_of_the_callers():
    """They see the gradient of the loss that it gives."""
    seen: list[Tensor] = []
    world = World.single(torch.device("cpu"))
    running = Engine(
        partial(Net, {"out.weight": seen.append}, {}), loss, SGD, global_batch=3, microbatch=1, world=world
    )
    loop, samples = running.loop(3), data()[:3]
    for sample in samples:
        mean = F.cross_entropy(loop(sample["x"]), sample["y"])
        loop.backward(mean)
        module = Net({}, {})
        module.load_state_dict(running.module.state_dict())
        (expected,) = torch.autograd.grad(F.cross_entropy(module(sample["x"]), sample["y"]), module.out.weight)
        torch.testing.assert_close(seen[-1], expected)
    loop.step()
    assert len(seen) == 3
    running.close()


@pytest.mark.parametrize("zero", [0, 3])
def test_a_hook_registered_between_microbatches_sees_those_that_follow(zero):
    """Also one that is registered for one microbatch alone, and where the plan has hooks of its own (zero 3)."""
    seen: dict[str, list[Any]] = {"between": [], "each": [], "sum": []}
    world = World.single(torch.device("cpu"))
    running = Engine(partial(Net, {}, {}), loss, SGD, Plan(zero=zero), global_batch=2, microbatch=1, world=world)
    loop, module = running.loop(2), running.module
    for index, sample in enumerate(data()[:2]):
        handle = module.out.weight.register_hook(seen["each"].append)
        if index == 1:
            module.words.weight.register_hook(seen["between"].append)
            module.blocks[0].inner.bias.register_post_accumulate_grad_hook(seen["sum"].append)
        loop.backward(F.cross_entropy(loop(sample["x"]), sample["y"]))
        handle.remove()
    loop.step()
    assert {kind: len(each) for kind, each in seen.items()} == {"between": 1, "each": 2, "sum": 1}
    running.close()
