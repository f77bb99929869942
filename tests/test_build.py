"""Recorded initialisation: the same distributions as a plain build, seeded by name, one tensor at a time."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shoal.build import build
from shoal.models import from_config


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


@pytest.mark.fast
def test_distributions_are_those_of_a_plain_build(values):
    assert values["linear.weight"].abs().max() <= 1 / 8 and values["linear.weight"].std() == pytest.approx(
        0.125 / 3**0.5, rel=0.05
    )
    assert values["scaled"].mean() == pytest.approx(1.0, abs=0.002) and values["scaled"].std() == pytest.approx(0.02, rel=0.1)
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
