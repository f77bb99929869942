"""Recorded initialisation: the same distributions as a plain build, seeded by name, one tensor at a time."""

from __future__ import annotations

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from shoal.comm import World
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.models import from_config, regression
from shoal.module.build import build, build_blank


class Everything(nn.Module):
    """Each way in which modules make their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 48)
        self.embedding = nn.Embedding(50, 16, padding_idx=3)
        self.scaled = nn.Parameter(torch.randn(40, 40) * 0.02 + 1.0)
        self.truncated = nn.Parameter(torch.empty(60, 60))
        nn.init.trunc_normal_(self.truncated, std=0.1, a=-0.15, b=0.15)
        self.orthogonal = nn.Parameter(torch.empty(12, 30))
        nn.init.orthogonal_(self.orthogonal)
        self.partly = nn.Parameter(torch.zeros(10, 4))
        nn.init.normal_(self.partly[5:])
        self.data = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t().contiguous())
        self.never_written = nn.Parameter(torch.empty(7))
        self.lstm = nn.LSTM(8, 8)
        self.norm = nn.BatchNorm1d(9)
        self.register_buffer("steps", torch.arange(6).float().pow(2))
        self.register_buffer("table", torch.tensor([3, 1, 2]), persistent=False)
        self.plain = torch.linspace(0, 1, 5)
        self.copied = copy.deepcopy(self.linear)
        self.tables = (torch.arange(3), [torch.ones(2)])
        self.tied = nn.Linear(16, 50, bias=False)
        self.tied.weight = self.embedding.weight


@pytest.fixture(scope="module")
def values() -> dict[str, torch.Tensor]:
    built = build(Everything, seed=0)
    assert built.how == "recorded"
    named = [*built.module.named_parameters(), *built.module.named_buffers(), ("plain", built.module.plain)]
    return {name: built.value(name, tensor) for name, tensor in named}


@pytest.mark.fast
def test_values_are_what_the_constructor_says(values):
    assert values["steps"].tolist() == [0, 1, 4, 9, 16, 25]
    assert values["table"].tolist() == [3, 1, 2]
    assert values["data"].tolist() == [[1, 3], [2, 4]]
    assert values["plain"].tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert values["never_written"].tolist() == [0] * 7
    assert values["embedding.weight"][3].tolist() == [0] * 16 and values["embedding.weight"].std() > 0.8
    assert values["partly"][:5].abs().max() == 0 and values["partly"][5:].abs().min() > 0
    assert values["norm.weight"].tolist() == [1] * 9 and values["norm.running_var"].tolist() == [1] * 9


@pytest.mark.fast
def test_a_copy_of_a_parameter_has_its_values(values):
    assert torch.equal(values["copied.weight"], values["linear.weight"]) and torch.equal(
        values["copied.bias"], values["linear.bias"]
    )


def test_copies_of_fake_tensors_share_their_mode():
    """A copied mode would give back each weak reference to a storage a second time, and the heap would be damaged."""
    built = build(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2), 0)
    assert built.how == "recorded"
    assert len({parameter.fake_mode for parameter in built.module.parameters()}) == 1


@pytest.mark.fast
def test_distributions_are_those_of_a_plain_build(values):
    assert values["linear.weight"].abs().max() <= 1 / 8 and values["linear.weight"].std() == pytest.approx(
        0.125 / 3**0.5, rel=0.05
    )
    assert values["scaled"].mean() == pytest.approx(1.0, abs=0.002) and values["scaled"].std() == pytest.approx(
        0.02, rel=0.1
    )
    assert values["truncated"].abs().max() <= 0.15 and values["truncated"].std() > 0.05
    torch.testing.assert_close(values["orthogonal"] @ values["orthogonal"].T, torch.eye(12))
    assert values["lstm.weight_hh_l0"].abs().max() <= 8**-0.5


@pytest.mark.fast
def test_a_tensor_is_seeded_by_its_name_and_the_seed_alone():
    def weight(name: str, seed: int) -> torch.Tensor:
        built = build(lambda: nn.ModuleDict({name: nn.Linear(8, 8), "other": nn.Linear(8, 8)}), seed)
        return built.value(f"{name}.weight", built.module[name].weight)

    state = torch.get_rng_state()
    assert torch.equal(weight("a", 1), weight("a", 1))
    assert not torch.equal(weight("a", 1), weight("b", 1))
    assert not torch.equal(weight("a", 1), weight("a", 2))
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator is not touched"


def test_transformers_initialise_as_they_do_on_the_cpu():
    """They skip initialisation on the meta device: GPT-2 scales residual projections by 1 / sqrt(2 layers)."""
    config = {"model_type": "gpt2", "n_layer": 8, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 32}
    built = build(from_config(config), 0)
    assert built.how == "recorded"
    std = {name: float(built.value(name, tensor).std()) for name, tensor in built.module.named_parameters()}
    assert std["transformer.wte.weight"] == pytest.approx(0.02, rel=0.05)
    assert std["transformer.h.3.attn.c_proj.weight"] == pytest.approx(0.02 / 4, rel=0.05)


class ReadsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.largest = float(self.weight.detach().max())


@pytest.mark.fast
def test_a_constructor_that_reads_values_is_built_on_the_cpu_and_said_so():
    built = build(ReadsValues, 0)
    assert built.how.startswith("built on CPU (")
    assert built.value("weight", built.module.weight).max() == pytest.approx(built.module.largest)


@pytest.mark.fast
def test_a_broken_constructor_raises_its_own_error():
    with pytest.raises(ValueError, match="mine"):
        build(lambda: (_ for _ in ()).throw(ValueError("mine")), 0)


@pytest.mark.fast
def test_a_ready_module_keeps_its_weights():
    module = nn.Linear(3, 3)
    built = build(module, 0)
    assert built.how == "given" and torch.equal(built.value("weight", module.weight), module.weight)


class Shares(nn.Module):
    """What is drawn once and used twice, in each way that constructors have."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(4, 6)
        self.cloned, self.again = nn.Parameter(base.clone()), nn.Parameter(base.clone())
        self.sliced, self.joined = nn.Parameter(base[1:3].clone()), nn.Parameter(torch.cat([base, base * 2]))
        rotation = torch.linalg.qr(torch.randn(5, 5))[0]
        self.rotation, self.back = nn.Parameter(rotation.clone()), nn.Parameter(torch.linalg.inv(rotation))
        order = torch.randperm(17)
        self.order = [order]  # not a buffer
        self.permuted, self.inverse = (
            nn.Parameter(torch.arange(17.0)[order]),
            nn.Parameter(torch.argsort(order).float()),
        )
        features = torch.randn(3, 8)
        self.sine, self.cosine = nn.Module(), nn.Module()
        self.sine.register_buffer("features", features * 1.0)
        self.cosine.register_buffer("features", features * 1.0)
        constant = torch.tensor([1.0, 2.0])
        constant.mul_(3.0)
        self.first, self.second = nn.Parameter(constant.clone()), nn.Parameter(constant.clone())
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))
        self.older = nn.utils.weight_norm(nn.Linear(5, 4))
        self.online, self.target = nn.Linear(3, 3), nn.Linear(3, 3)
        self.target.load_state_dict(self.online.state_dict())
        self.double = copy.deepcopy(self.online).to(torch.float64)


@pytest.fixture(scope="module")
def shared() -> dict[str, torch.Tensor]:
    built = build(Shares, seed=0)
    assert built.how == "recorded"
    return {
        name: built.value(name, tensor)
        for name, tensor in [*built.module.named_parameters(), *built.module.named_buffers()]
    }


def test_what_is_drawn_once_is_one_value_wherever_it_flows(shared):
    base = shared["cloned"]
    assert torch.equal(shared["again"], base) and torch.equal(shared["sliced"], base[1:3])
    assert torch.equal(shared["joined"], torch.cat([base, base * 2]))
    torch.testing.assert_close(shared["rotation"] @ shared["back"], torch.eye(5))
    assert shared["permuted"][shared["inverse"].long()].tolist() == list(range(17))
    assert torch.equal(shared["sine.features"], shared["cosine.features"])
    assert torch.equal(shared["target.weight"], shared["online.weight"])
    assert torch.equal(shared["double.weight"], shared["online.weight"].double())


def test_a_constant_that_is_changed_in_place_is_changed_once(shared):
    assert shared["first"].tolist() == shared["second"].tolist() == [3, 6]


def test_layers_that_torch_copies_start_alike(shared):
    layers = [{n: v for n, v in shared.items() if n.startswith(f"encoder.layers.{i}.")} for i in range(2)]
    assert len(layers[0]) == len(layers[1]) == 12
    assert all(torch.equal(one, other) for one, other in zip(layers[0].values(), layers[1].values(), strict=True))


def test_normalised_weights_belong_to_their_norms(shared):
    weight = shared["spectral.parametrizations.weight.original"]
    u, v = (shared[f"spectral.parametrizations.weight.0._{each}"] for each in "uv")
    assert float(u @ weight @ v) > 0.9 * float(torch.linalg.svdvals(weight)[0])
    parts = [shared[f"weight_norm.parametrizations.weight.original{i}"] for i in range(2)]
    for norm, direction in (parts, (shared["older.weight_g"], shared["older.weight_v"])):
        torch.testing.assert_close(norm.flatten(), direction.norm(dim=1))


def test_a_draw_that_one_tensor_has_is_seeded_as_ever():
    """The weights of ordinary models are those of earlier versions: these are recorded numbers."""
    built = build(lambda: nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.LayerNorm(2)}), 0)
    found = built.value("a.weight", built.module["a"].weight)
    torch.testing.assert_close(found, torch.tensor(A_WEIGHT), atol=1e-6, rtol=0)


A_WEIGHT = [[-0.212029, -0.569792, 0.026880], [-0.468020, -0.329674, 0.517116]]


class _Seeds(nn.Module):
    """Two modules that agree on a draw by its seed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        for name in ("a", "b"):
            state = torch.get_rng_state()
            generator = None
            if how == "generator":
                generator = torch.Generator().manual_seed(3)
            elif how == "seed":
                torch.manual_seed(3)
            setattr(self, name, nn.Parameter(torch.randn(4, generator=generator)))
            if how == "state":
                torch.set_rng_state(state)


@pytest.mark.parametrize("how", ["generator", "seed", "state"])
def test_a_constructor_that_seeds_is_built_on_the_cpu(how):
    built = build(lambda: _Seeds(how), 0)
    assert built.how == "built on CPU (it sets a seed or draws from a generator of its own)"
    values = {name: built.value(name, tensor) for name, tensor in built.module.named_parameters()}
    assert torch.equal(values["a"], values["b"])
    if how != "state":
        assert torch.equal(values["a"], torch.randn(4, generator=torch.Generator().manual_seed(3)))


def test_numpy_and_python_are_seeded_and_left_as_they_were():
    def factory() -> nn.Module:
        module = nn.Module()
        module.a = nn.Parameter(torch.from_numpy(np.random.randn(3)))
        module.b = nn.Parameter(torch.tensor([random.random()]))
        return module

    def values(seed: int) -> list[torch.Tensor]:
        built = build(factory, seed)
        return [built.value(name, tensor) for name, tensor in built.module.named_parameters()]

    states = random.getstate(), np.random.get_state()[1].tolist()
    one, other = values(1), values(2)
    assert all(map(torch.equal, one, values(1))) and not any(map(torch.equal, one, other))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


@pytest.mark.parametrize("part", [slice(None), slice(1)])
def test_a_constructor_that_changes_what_was_there_is_built_on_the_cpu(part):
    ready = nn.Linear(2, 2)

    def factory() -> nn.Module:
        nn.init.constant_(ready.weight[part], 5.0)
        return nn.Sequential(ready, nn.Linear(2, 2))

    built = build(factory, 0)
    assert built.how == "built on CPU (it changes tensors that were there before)"
    assert (built.value("0.weight", built.module[0].weight)[part] == 5).all()


READY = torch.tensor([7.0, 8.0])


class Copies(nn.Module):
    """Copies of constants and of a tensor that existed before, some of which change afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(copy.deepcopy(torch.tensor(3.0)))
        self.register_buffer("mask", copy.deepcopy(torch.tensor([True])))
        self.register_buffer("ready", copy.deepcopy(READY).add_(1))
        pair = [torch.tensor(5)] * 2
        self.pair = copy.deepcopy(pair)
        pair[0].add_(1)
        self.register_buffer("read", torch.tensor(torch.tensor(4).item()))


@pytest.mark.fast
def test_a_copy_of_a_constant_is_recorded():
    built = build(Copies, 0)
    assert built.how == "recorded"
    named = {name: getattr(built.module, name) for name in ("weight", "mask", "ready", "read")}
    found = {name: built.value(name, tensor).tolist() for name, tensor in named.items()}
    assert found == {"weight": 3.0, "mask": [True], "ready": [8.0, 9.0], "read": 4} and READY.tolist() == [7.0, 8.0]
    assert built.module.pair[0] is built.module.pair[1]
    assert int(built.value("pair", built.module.pair[0])) == 5


def test_a_shallow_copy_of_a_tensor_is_made_on_the_cpu():
    def factory() -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("table", copy.copy(torch.tensor([1.0, 2.0])))
        return module

    built = build(factory, 0)
    assert built.how == "built on CPU (it makes a tensor of the storage of another one, as copy.copy does)"
    assert built.value("table", built.module.table).tolist() == [1.0, 2.0]


def test_a_module_that_is_not_registered_is_real():
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = nn.Linear(2, 2)
            self.target = [copy.deepcopy(self.online)]

    built = build(Hides, 0)
    assert built.how == "built on CPU (it keeps modules that are not registered)"
    assert torch.equal(built.module.target[0].weight, built.value("online.weight", built.module.online.weight))


class Spectral(nn.Module):
    """A spectral convolution: its weights are complex, or a `pair` of real ones, as the refusal says."""

    def __init__(self, pair: bool) -> None:
        super().__init__()
        weight = torch.randn(5, 5, dtype=torch.complex64)
        self.weight, self.pair = nn.Parameter(torch.view_as_real(weight) if pair else weight), pair

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.view_as_complex(self.weight.float()) if self.pair else self.weight
        return torch.fft.irfft(torch.fft.rfft(x.float()) @ weight, n=8)


@pytest.mark.parametrize("ready", [False, True])
def test_complex_parameters_are_refused_with_what_to_do(ready):
    model = Spectral(False) if ready else lambda: Spectral(False)
    with pytest.raises(UserError, match=r"weight is complex64.*view_as_real"):
        build(model, 0)


class Neighbours(nn.Module):
    """Adds up neighbours in a graph by a sparse matrix, kept as such or in dense `parts`, as the refusal says."""

    def __init__(self, parts: bool) -> None:
        super().__init__()
        self.linear, self.parts = nn.Linear(8, 8), parts
        near = (torch.eye(8) + torch.eye(8).roll(1, 0)).to_sparse().coalesce()
        self.register_buffer("near", None if parts else near)
        self.register_buffer("indices", near.indices() if parts else None)
        self.register_buffer("values", near.values() if parts else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = torch.sparse_coo_tensor(self.indices, self.values, (8, 8)) if self.parts else self.near
        return torch.sparse.mm(near, self.linear(x).T).T


def with_neighbours(parts: bool) -> float:
    samples = [{"inputs": torch.ones(8), "targets": torch.zeros(8)} for _ in range(4)]
    made, sgd = partial(Neighbours, parts), partial(torch.optim.SGD, lr=1e-2)
    engine = Engine(made, regression, sgd, global_batch=4, world=World.single("cpu"))
    try:
        return [engine.step(batch).loss for batch in engine.batches(samples, steps=2)][-1]
    finally:
        engine.close()


def test_sparse_tensors_are_refused_and_the_remedy_trains():
    """It was an error of torch."""
    with pytest.raises(UserError, match=r"near is a sparse tensor.*torch.sparse_coo_tensor"):
        with_neighbours(False)
    assert with_neighbours(True) > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_complex_numbers_as_pairs_train_as_in_torch(precision):
    samples = [{"inputs": torch.randn(8), "targets": torch.randn(8)} for _ in range(4)]
    torch.manual_seed(0)
    whole, adamw = Spectral(False), partial(torch.optim.AdamW, lr=1e-1)
    ready = Spectral(True)
    ready.load_state_dict({"weight": torch.view_as_real(whole.weight.detach().clone())})
    engine = Engine(ready, regression, adamw, global_batch=4, precision=precision, world=World.single("cpu"))
    losses = [engine.step(batch).loss for batch in engine.batches(samples, steps=3)]
    engine.close()
    batch, optimizer, expected = (
        {k: torch.stack([s[k] for s in samples]) for k in samples[0]},
        adamw(whole.parameters()),
        [],
    )
    for _ in range(3):
        total, count = regression(whole, batch)
        expected.append(float(total / count))
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 3e-2)


def test_a_model_without_values_is_made_as_one_with_them():
    """Also where the constructor reads a value, so that it cannot be made of fakes."""

    class Reads(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 4)
            self.scale = float(self.weight.abs().max())

    def look(module):
        tensors = (*module.named_parameters(), *module.named_buffers())
        return [(name, each.shape, each.stride(), each.dtype, each.requires_grad) for name, each in tensors]

    for factory, how in ((Everything, "without values"), (Reads, "built on CPU")):
        blank = build_blank(factory)
        assert blank.how.startswith(how) and look(blank.module) == look(build(factory, 0).module)


class _TiedByData(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        if how == "data":
            self.head.weight.data = self.embedding.weight.data
        elif how == "part":
            self.head.weight = nn.Parameter(self.embedding.weight.detach()[1:])
        else:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize("ready", [False, True])
def test_parameters_that_are_tied_by_their_memory_are_refused(ready):
    """They would have been two, each with a part of the gradient."""
    for how in ("data", "part"):
        with pytest.raises(UserError, match=r"embedding\.weight and head\.weight lie in the same memory"):
            build(_TiedByData(how) if ready else lambda how=how: _TiedByData(how), 0)
    assert len(list(build(lambda: _TiedByData("object"), 0).module.parameters())) == 1
