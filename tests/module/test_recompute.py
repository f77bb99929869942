"""Recompute: the same numbers (tests/parity) with fewer activations kept, and options that are refused by name."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal import Engine, Plan, UserError
from shoal.comm import World
from shoal.comm.simulation import simulate_world
from shoal.models import GPT, MLP, GPTConfig, causal_lm, regression
from shoal.module.chosen_blocks import as_ranges, chosen_blocks
from shoal.module.compiling import as_written, compile_blocks, recomputable
from shoal.module.recompute import Recompute
from shoal.pipeline.arrived import Box
from shoal.pipeline.split_backward import input_half, weight_half
from tests.exchange import teacher
from tests.parity.cases import text

LAYERS = 4


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=61, sequence=32, layers=LAYERS, d_model=32, heads=4))


def kept(option: object, steps: int = 2) -> tuple[int, list[int]]:
    """Bytes that autograd keeps of one forward, weights not counted, and which blocks are computed again; in the last
    of `steps` forwards."""
    torch.manual_seed(0)
    model = gpt()
    recompute = Recompute(recomputable(model), option)  # type: ignore[arg-type]
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    ids = torch.randint(0, 61, (4, 32))
    for _ in range(steps):
        found: dict[int, int] = {}

        def pack(tensor: torch.Tensor, found: dict[int, int] = found) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                found[storage._cdata] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(ids)
        recompute.decide(lambda chosen: chosen)
    output.sum().backward()
    return sum(found.values()), recompute.chosen


def test_what_is_kept():
    everything, none = kept("none")
    full, blocks = kept("full")
    assert none == [] and blocks == list(range(LAYERS))
    # torch's checkpoint keeps the inputs beside autograd, which sees nothing of the blocks but the head and the
    # embedding
    assert full < 0.2 * everything
    half, which = kept({"name": "blocks", "every": 2})
    assert which == [0, 2] and full < half < everything
    assert kept({"name": "blocks", "full": 2})[1] == kept({"name": "blocks", "full": "0-1"})[1] == [0, 1]
    mixed, which = kept({"name": "blocks", "full": [3], "selective": 2})
    some, _ = kept({"name": "blocks", "selective": 2})
    assert which == [0, 1, 3] and mixed < some < everything
    whole, every = kept("selective")
    assert kept({"name": "blocks", "selective": LAYERS}) == (whole, every)
    budget, which = kept({"name": "budget", "keep": 0.5})
    assert 1 <= len(which) < LAYERS and budget < 0.75 * everything
    assert kept({"name": "budget", "keep": 1})[1] == [] and kept({"name": "budget", "keep": 0})[1] == list(
        range(LAYERS)
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("ful", 'plan.recompute = "ful" is not one of none, full, blocks, selective, budget. Did you mean "full"?'),
        ({"name": "blocks"}, "give either which = [places] or every = 2"),
        ({"name": "blocks", "every": -1}, "give either which = [places] or every = 2"),
        ({"name": "blocks", "which": [9]}, "which = [9]: the model has the blocks 0 to 3"),
        ({"name": "blocks", "full": "0-4"}, "full = '0-4': the model has the blocks 0 to 3"),
        ({"name": "blocks", "full": 5}, "full = 5: give 0 to 4 of the model's 4 blocks"),
        ({"name": "blocks", "full": 2, "selective": 3}, "selective = 3: give 0 to 2"),
        ({"name": "blocks", "full": "0-2", "selective": [2]}, "both name block 2"),
        ({"name": "blocks", "full": "0 to 2"}, "full = '0 to 2': give a number of blocks, a list of places, or ranges"),
        ({"name": "blocks", "full": "3-1"}, "full = '3-1': give a number of blocks, a list of places, or ranges"),
        ({"name": "blocks", "full": ","}, "full = ',': give a number of blocks, a list of places, or ranges"),
        ({"name": "blocks", "full": True}, "full = True: give a number of blocks, a list of places, or ranges"),
        ({"name": "blocks", "full": 2, "every": 2}, "give either which = [places] or every = 2"),
        (
            {"name": "selective", "save": ["matmull"]},
            "save = ['matmull']: give a list of matmul, attention, convolution",
        ),
        ({"name": "budget", "keep": 2}, "keep = 2: give the part of the bytes to keep, 0 to 1"),
        ({"name": "budget", "part": 2}, '"budget" has no parameter "part". "budget" takes: keep'),
    ],
)
def test_wrong_options_are_refused_by_name(option, message):
    with pytest.raises(UserError) as error:
        Recompute(recomputable(gpt()), option)
    assert message in str(error.value)


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)), st.integers(0, 41))
def test_blocks_by_ranges_are_those_by_places(whole, some, number):
    whole, some = sorted(whole), sorted(some - whole)
    if not whole and not some:
        return
    assert chosen_blocks(41, (), 0, as_ranges(whole), as_ranges(some)) == (whole, some)
    assert chosen_blocks(41, (), 0, whole, some) == (whole, some)
    left = [place for place in range(41) if place not in whole]
    if number <= len(left) and (number or whole):
        assert chosen_blocks(41, (), 0, whole, number) == (whole, left[:number])


def test_a_model_without_repeated_parts_is_told():
    with pytest.raises(UserError, match=r"repeated blocks .* has none"):
        Engine(partial(nn.LSTM, 3, 4), regression, torch.optim.SGD, Plan(recompute="full"), global_batch=4)
    assert len(recomputable(MLP((10, 32, 3), "tanh", 0.0))) == 1, "a chain of plain layers is one part"
    pairs = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.ModuleList([nn.Linear(2, 2)])])
    assert [type(part) for part in recomputable(pairs)] == [nn.Linear] * 3, "containers have no forward"


class Shared(nn.Module):
    """One block that is called twice, with dropout of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(teacher.INPUTS, teacher.INPUTS), nn.Dropout(0.3), nn.Tanh())
        self.blocks = nn.ModuleList([inner, nn.Linear(teacher.INPUTS, teacher.OUTPUTS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + self.blocks[0](x)
        return self.blocks[1](x)


@pytest.mark.parametrize("dropout", ["keyed", "fused"])
def test_a_block_that_is_called_twice_draws_the_same_again(dropout):
    losses = {}
    for option in ("none", "full"):
        running = Engine(
            Shared, regression, teacher.ADAMW, Plan(recompute=option), global_batch=16, microbatch=4, dropout=dropout
        )
        losses[option] = [running.step(batch).loss for batch in running.batches(teacher.data(), steps=5)]
        running.close()
    assert losses["full"] == losses["none"]


class Moody(nn.Module):
    """Blocks with what a second forward could get wrong: buffers that are read and changed, in place and re-bound,
    dropout, a hook that changes the input, arguments called like those of torch's checkpoint."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Mood(dropout) for _ in range(3))
        self.outward = nn.Linear(teacher.INPUTS, teacher.OUTPUTS)
        for block in self.blocks:
            block.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, debug=0.5, function=2.0)
        return self.outward(x)


class _Mood(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(teacher.INPUTS, teacher.INPUTS))
        self.dropout = dropout
        self.register_buffer("mean", torch.ones(()))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, debug: float, function: float) -> torch.Tensor:
        y = self.inner(x * self.mean) * debug * function
        if self.training:
            self.mean = self.mean * 0.9 + y.detach().square().mean() * 0.1
            self.count += 1
        return nn.functional.dropout(y, self.dropout, self.training).tanh()


def trained(model, plan: Plan, steps: int = 4, **more) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    running = Engine(model, regression, teacher.ADAMW, plan, global_batch=16, microbatch=8, **more)
    try:
        results = [running.step(batch) for batch in running.batches(teacher.data(), steps=steps)]
        return [r.loss for r in results], [r.grad_norm for r in results], dict(running.module.named_buffers())
    finally:
        running.close()


@pytest.mark.parametrize(
    "option", ["full", {"name": "blocks", "which": [1]}, "selective", {"name": "budget", "keep": 0.3}], ids=str
)
@pytest.mark.parametrize("dropout", ["keyed", "fused"])
def test_a_second_forward_finds_all_as_the_first(option, dropout):
    plain, again = (trained(Moody, Plan(recompute=each), dropout=dropout) for each in ("none", option))
    assert again[:2] == plain[:2]
    assert all(torch.equal(value, again[2][name]) for name, value in plain[2].items())
    assert all(float(value) == 8 for name, value in again[2].items() if name.endswith("count")), (
        "two microbatches of four steps"
    )


class Rectified(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rrelu(x, training=self.training)


@pytest.mark.parametrize("kind", [nn.RReLU, Rectified])
@pytest.mark.parametrize("option", ["full", "selective"])
def test_noise_that_a_kernel_fills_once_it_is_saved_is_found_as_it_was(option, kind):
    """Backward computed with memory that nothing had written."""

    def rectified() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(teacher.INPUTS, teacher.INPUTS), kind()) for _ in range(2)]
        return nn.Sequential(*blocks, nn.Linear(teacher.INPUTS, teacher.OUTPUTS))

    plain, again = (trained(rectified, Plan(recompute=each)) for each in ("none", option))
    assert again[:2] == plain[:2]


class _Late(nn.Module):
    """Follows its own mean once it has run three times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(teacher.INPUTS, teacher.INPUTS)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.ones(teacher.INPUTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x * self.mean).tanh()
        if self.training:
            self.count += 1
            if self.count > 3:
                self.mean = self.mean.lerp(y.detach().mean(0), 0.3)
        return y


class Later(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Late() for _ in range(2))
        self.outward = nn.Linear(teacher.INPUTS, teacher.OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.outward(x)


def test_a_buffer_that_changes_only_later_is_found_as_it_was_too():
    """The first forward has left it as it was: each of the later ones changed it twice."""
    plain, again = (trained(Later, Plan(recompute=each)) for each in ("none", "full"))
    assert again[:2] == plain[:2]
    assert all(torch.equal(value, again[2][name]) for name, value in plain[2].items())


class _Counts(nn.Module):
    """Counts its forwards, and follows its mean, which it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(teacher.INPUTS, teacher.INPUTS)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(teacher.INPUTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).tanh()
        self.count += self.training
        if self.training:
            self.mean.lerp_(y.detach().mean(0), 0.3)
        return y


def counted(world: World, option: str) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)

    def model() -> nn.Module:
        return nn.Sequential(_Counts(), _Counts(), nn.Linear(teacher.INPUTS, teacher.OUTPUTS))

    plan = Plan(dp=world.size, recompute=option)
    engine = Engine(model, regression, teacher.ADAMW, plan, global_batch=8, microbatch=2, world=world)
    for batch in engine.batches(teacher.data(), steps=3):
        engine.step(batch)
    engine.close()
    return {name: value.clone() for name, value in engine.module.named_buffers()}


def test_buffers_of_ranks_are_those_of_one_process_where_blocks_are_computed_again():
    (alone,) = simulate_world(1, counted, "none")
    for found in simulate_world(2, counted, "full"):
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("option", ["full", "selective"])
def test_a_graph_that_is_kept_gives_its_gradient_again(option):
    """As a backward in two halves asks for it: `selective` finds all that it has kept each time."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)))
    Recompute(list(blocks), option)
    loss = blocks(torch.randn(3, 4)).square().sum()
    weights = list(blocks.parameters())
    for one, other in zip(*(torch.autograd.grad(loss, weights, retain_graph=True) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


class Counted(nn.Module):
    """Two layers and a norm: three places where a backward in halves starts again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.other = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.calls: list[None] = []  # a number would be as the first forward found it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(None)
        return x + self.other(self.one(self.norm(x)).tanh())


@pytest.mark.parametrize("option", ["full", "selective"])
def test_each_half_of_a_backward_computes_a_block_again_once(option):
    blocks = nn.Sequential(*(Counted() for _ in range(2)))
    x = torch.randn(3, 4)
    blocks(x).square().sum().backward()
    whole = [parameter.grad for parameter in blocks.parameters()]
    blocks.zero_grad()
    Recompute(list(blocks), option)
    calls = [len(block.calls) for block in blocks]
    box = Box(x)
    _, starts = input_half([blocks(box.tensor).square().sum()], [None], [box])
    assert len(starts) > 2 * len(blocks), "several starts a block"
    assert [len(block.calls) - before for block, before in zip(blocks, calls, strict=True)] == [2, 2]
    weight_half(starts)
    assert [len(block.calls) - before for block, before in zip(blocks, calls, strict=True)] == [3, 3]
    for parameter, grad in zip(blocks.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


@cache
def compiled(model: Any) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    return trained(model, Plan(compile="aot_eager"))


@pytest.mark.parametrize("option", ["full", {"name": "budget", "keep": 0.3}], ids=str)
@pytest.mark.parametrize("model", [partial(Moody, 0.0), Moody, Shared], ids=["plain", "dropout", "shared"])
def test_compiled_blocks_are_computed_again_as_well(option, model):
    plain, again = compiled(model), trained(model, Plan(recompute=option, compile="aot_eager"))
    assert again[0] == pytest.approx(plain[0], rel=1e-6) and again[1] == pytest.approx(plain[1], rel=1e-5)


class Changes(nn.Module):
    """A block of one graph that changes results of products in place, and a buffer by which it divides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(teacher.INPUTS, teacher.INPUTS), nn.BatchNorm1d(teacher.INPUTS)
        self.register_buffer("mean", torch.ones(teacher.INPUTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.inner(x).add_(1)
        before = 1 / self.mean
        with torch.no_grad():
            self.mean.lerp_(found.abs().mean(0), 0.5)
        return x + nn.functional.dropout(torch.tanh(self.norm(found)) / self.mean * before, 0.0).relu_()


def kept_by(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that backward of a forward keeps, weights not counted; runs both."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    output.square().sum().backward()
    return sum(nbytes for key, nbytes in found.items() if key not in weights)


def test_compiled_blocks_keep_results_of_some_operations():
    """Those that are named: not those that other blocks of the class keep."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.ModuleList(Changes() for _ in range(3)))
    ways: dict[str, list[str] | None] = {"written": None, "compiled": None, "products": ["matmul"], "nothing": []}
    models = {name: copy.deepcopy(plain) for name in ways}
    for name, save in ways.items():
        models[name].forward = partial(_in_turn, models[name][0])
        if name != "written":
            compile_blocks(models[name], "aot_eager")
        if save is not None:
            Recompute(recomputable(models[name]), {"name": "selective", "save": save}, backend="aot_eager")
    for step in range(2):
        x = torch.randn(8, teacher.INPUTS, generator=torch.Generator().manual_seed(step), requires_grad=True)
        bytes_of = {name: kept_by(model, x) for name, model in models.items()}
        assert bytes_of["nothing"] < bytes_of["products"] < bytes_of["compiled"]
        for own in (models["products"], models["nothing"]):
            for values in (nn.Module.parameters, nn.Module.buffers):
                for one, other in zip(values(models["written"]), values(own), strict=True):
                    torch.testing.assert_close(getattr(one, "grad", None), getattr(other, "grad", None))
                    torch.testing.assert_close(one, other)


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


def test_compiled_blocks_of_more_sizes_than_torch_has_graphs_of_one_code():
    """The ninth model of a process, whose blocks are of the same class, ended in torch's error."""
    with torch._dynamo.config.patch(recompile_limit=2):
        for width in (2, 3, 5, 7, 11):
            model = nn.Sequential(nn.ModuleList(Wide(width) for _ in range(2)))
            compile_blocks(model, "aot_eager")
            Recompute(recomputable(model), "selective", backend="aot_eager")
            x = torch.randn(4, width)
            expected = [nn.Linear.forward(block.inner, x) for block in model[0]]
            found = [block(x) for block in model[0]]
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, x + torch.tanh(other))


def _in_turn(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


SELECTIVE = {"recompute": "selective", "compile": "aot_eager"}


def selected(world: World, given: dict[str, Any]) -> list[tuple[float, float | None]]:
    running = Engine(gpt, causal_lm, teacher.ADAMW, Plan(**given), global_batch=8, microbatch=2, world=world)
    try:
        return [(each.loss, each.grad_norm) for each in map(running.step, running.batches(text(sequence=32), steps=3))]
    finally:
        running.close()


SPREAD = [
    {"dp": 2, "zero": 3},
    pytest.param({"pp": 2, "schedule": "zb1p"}, marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "memory": {}}, marks=pytest.mark.matrix),
    pytest.param({"dp": 2, "recompute": {"name": "blocks", "selective": 2, "full": 1}}, marks=pytest.mark.matrix),
]


@pytest.mark.parametrize("given", SPREAD, ids=str)
def test_compiled_blocks_that_keep_results_go_with(given):
    plain = selected(World.single(), {})
    for one, other in zip(plain, simulate_world(2, selected, SELECTIVE | given)[0], strict=True):
        assert other == pytest.approx(one, rel=2e-6)


def test_an_observer_sees_the_operations_of_compiled_blocks_that_keep_results():
    running = Engine(gpt, causal_lm, teacher.ADAMW, Plan(**SELECTIVE), global_batch=4, microbatch=4)
    seen: list[Any] = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **kwargs or {})

    with as_written(), Seeing():
        running.step(next(running.batches(text(sequence=32))))
    running.close()
    products = torch.ops.aten.addmm.default, torch.ops.aten.mm.default
    assert sum(each in products for each in seen) > LAYERS * 3


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        (Moody, {}, '_Mood is not one graph for torch.compile .*side effect.* take "full", or compile = false'),
        (partial(MLP, [teacher.INPUTS, 8, 8, teacher.OUTPUTS]), {}, "takes a model's repeated blocks"),
        (gpt, {"save": ["mm"]}, "save = .*'mm'.*: give a list of matmul, attention, convolution"),
    ],
)
def test_compiled_blocks_of_which_nothing_can_be_selected(model, given, said):
    option = {"name": "selective", **given}
    with pytest.raises(UserError, match=said):
        trained(model, Plan(recompute=option, compile="aot_eager"))


def test_a_copy_of_the_module_has_its_own_weights():
    running = Engine(Shared, regression, teacher.ADAMW, Plan(recompute="full"), global_batch=16, microbatch=8)
    other = copy.deepcopy(running.module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert float(other(torch.ones(2, teacher.INPUTS)).abs().max()) == 0


@pytest.mark.parametrize("transform", [False, True], ids=["backward", "torch.func"])
def test_the_objective_is_the_same(transform):
    gradients = {}
    for option in ("none", "full"):
        running = Engine(Shared, regression, teacher.ADAMW, Plan(recompute=option), global_batch=16, microbatch=8)
        objective = running.objective(next(running.batches(teacher.data())))
        parameters = {name: value.detach().clone().requires_grad_() for name, value in running.parameters.items()}
        if transform:
            gradients[option] = torch.func.grad(objective)(parameters)
        else:
            objective(parameters).backward()
            gradients[option] = {name: value.grad for name, value in parameters.items()}
    for name, gradient in gradients["none"].items():
        assert torch.equal(gradient, gradients["full"][name])


def budget_of_uneven_ranks(world) -> list[int]:
    running = teacher.engine(world, "allreduce")
    running.close()
    running = Engine(
        gpt, causal_lm, teacher.ADAMW, Plan(dp=world.size, zero=3, recompute={"name": "budget", "keep": 0.5}),
        global_batch=5, microbatch=3, dropout="fused", world=world,
    )  # fmt: skip
    for batch in running.batches(text(sequence=32), steps=3):
        running.step(batch)
    running.close()
    return running.parts.recompute.chosen


def test_ranks_agree_on_a_budget():
    first, second = simulate_world(2, budget_of_uneven_ranks)
    assert first == second and 0 < len(first) <= LAYERS


# Models of transformers that keep keys and values unless they are told not to

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CACHING = {
    "bloom": ("Bloom", "ForCausalLM", SIZES),
    "falcon": ("Falcon", "ForCausalLM", {**SIZES, "alibi": True}),
    "t5": ("T5", "ForConditionalGeneration", {
        "vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0,
    }),
}  # fmt: skip


def caching(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    name, role, sizes = CACHING[kind]
    return getattr(transformers, name + role)(getattr(transformers, f"{name}Config")(**sizes))


def of_its_logits(model: nn.Module, mb: dict) -> tuple[torch.Tensor, torch.Tensor]:
    more = {"decoder_input_ids": mb["input_ids"]} if model.config.is_encoder_decoder else {}
    logits = model(input_ids=mb["input_ids"], **more).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), mb["labels"].flatten(), reduction="sum"), (
        mb["labels"] >= 0
    ).sum()


@pytest.mark.parametrize("kind", CACHING)
def test_a_second_forward_finds_no_cache(kind):
    losses = []
    for option in ("none", "full"):
        engine = Engine(
            partial(caching, kind), of_its_logits, partial(torch.optim.AdamW, lr=1e-3), Plan(recompute=option),
            global_batch=2, world=World.single("cpu"),
        )  # fmt: skip
        losses.append([engine.step(batch).loss for batch in engine.batches(text()[:4], steps=2)])
        engine.close()
    assert losses[0] == losses[1]


class WithOtherWeights(nn.Module):
    """Calls a block once more with weights that are computed of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(teacher.INPUTS, 24), nn.Linear(24, teacher.OUTPUTS)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inward(x)
        for block in self.blocks:
            half = {name: each * 0.5 for name, each in block.named_parameters()}
            h = h + torch.func.functional_call(block, half, (h,))
            h = h + block(h)
        return self.outward(h)


def with_other_weights(world: World, recompute: str, **plan) -> list[float]:
    torch.set_num_threads(1)
    running = Engine(
        WithOtherWeights, regression, partial(torch.optim.SGD, lr=0.05),
        Plan(dp=world.size, recompute=recompute, **plan), global_batch=16, microbatch=4, world=world,
    )  # fmt: skip
    try:
        return [running.step(batch).loss for batch in running.batches(teacher.data(), steps=3)]
    finally:
        running.close()


@pytest.mark.parametrize("zero", [0, 3])
def test_a_block_is_computed_again_with_the_weights_that_it_was_given(zero):
    """It was with its own, and gradients were others."""
    (kept,) = simulate_world(1, with_other_weights, "none")
    for losses in simulate_world(2, partial(with_other_weights, zero=zero), "full"):
        assert losses == pytest.approx(kept, rel=1e-5)


class Adversary(nn.Module):
    """Judges what it makes with its judge frozen, which learns from other calls of it, as a GAN's does."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(teacher.INPUTS, 24), nn.Linear(24, teacher.OUTPUTS)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.inward(x)
        self.blocks.requires_grad_(False)
        judged = self.blocks[1](self.blocks[0](made))
        self.blocks.requires_grad_(True)
        return self.outward(judged - self.blocks[1](self.blocks[0](made.detach())) * 0.5)


@pytest.mark.parametrize("option", ["full", "selective"])
def test_a_block_that_was_frozen_is_computed_again_frozen(option):
    losses = []
    for recompute in ("none", option):
        engine = Engine(
            Adversary, regression, partial(torch.optim.SGD, lr=0.05), Plan(recompute=recompute), global_batch=8
        )
        losses.append([engine.step(batch).loss for batch in engine.batches(teacher.data(), steps=3)])
        engine.close()
    assert losses[1] == losses[0]
