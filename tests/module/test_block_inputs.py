"""Blocks that change what they are given: a forward that backward repeats finds it as the first one did."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shoal import Engine, Plan, UserError
from shoal.models import regression
from shoal.module import selective
from shoal.module.recompute import Recompute
from tests.exchange import teacher


class _Adds(nn.Module):
    """Adds to its input in place, by `way` of an argument, a keyword, a container, or both of two names of it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.inner = way, nn.Linear(teacher.INPUTS, teacher.INPUTS)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = {"keyword": lambda: kwargs["x"], "container": lambda: args[0]["x"][0]}.get(self.way, lambda: args[0])()
        used = torch.relu(x) + 0.5 * torch.sigmoid(args[1] * 1 if self.way == "twice" else x * 1)
        x += self.inner(used)
        return x * 1


class _Activates(nn.Module):
    """torchvision's order: normalization, and an activation in place in the block behind it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(teacher.INPUTS, teacher.INPUTS), nn.BatchNorm1d(teacher.INPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(torch.relu_(x)))


class Model(nn.Module):
    def __init__(self, block: type[nn.Module], way: str, after: bool = False) -> None:
        super().__init__()
        self.way, self.after = way, after
        self.inward = nn.Linear(teacher.INPUTS, teacher.INPUTS)
        self.blocks = nn.ModuleList(block(way) for _ in range(2))
        self.outward = nn.Linear(teacher.INPUTS, teacher.OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for block in self.blocks:
            match self.way:
                case "keyword":
                    y = block(x=x)
                case "container":
                    y = block({"x": [x, None]})
                case "twice":
                    y = block(x, x)
                case _:
                    y = block(x)
            if self.after:
                x = y.add_(x) if isinstance(block, _Gives) else x.add_(y)
            else:
                x = y
        return self.outward(x)


def trained(plan: dict[str, Any], *model: Any, dropout: str = "keyed") -> tuple[list[float], list[float]]:
    running = Engine(
        partial(Model, *model), regression, teacher.ADAMW, Plan(**plan), global_batch=16, microbatch=8, dropout=dropout
    )
    try:
        results = [running.step(batch) for batch in running.batches(teacher.data(), steps=3)]
        return [r.loss for r in results], [r.grad_norm for r in results]
    finally:
        running.close()


class _Forces(nn.Module):
    """Moves its input along the gradient of an energy, as force fields do: a backward in the middle of the forward,
    before or behind (`way`) a change of the input in place."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.inner = way, nn.Linear(teacher.INPUTS, teacher.INPUTS)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            place = x * 1
            if self.way == "behind":
                x.add_(1)
            energy = torch.tanh(self.dropout(self.inner(place)) * torch.sigmoid(place)).square().sum()
            (force,) = torch.autograd.grad(energy, place, create_graph=True)
        return (x if self.way == "behind" else x.add_(1)) - force


class _Compares(nn.Module):
    """Sees that it is given one tensor twice, as F.multi_head_attention_forward does."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner = nn.Linear(teacher.INPUTS, teacher.INPUTS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) if x is y else self.inner(x) + y


MODELS = [(_Adds, "argument"), (_Adds, "keyword"), (_Adds, "container"), (_Adds, "twice"), (_Activates, "in place")]
MODELS += [(_Compares, "twice"), (_Forces, "before"), (_Forces, "behind")]


@pytest.mark.parametrize(("block", "way"), MODELS, ids=[f"{block.__name__}-{way}" for block, way in MODELS])
def test_a_second_forward_finds_the_inputs_as_the_first(block, way):
    plain = trained({}, block, way)
    for option in ("full", "selective", {"name": "budget", "keep": 0.3}):
        assert trained({"recompute": option}, block, way) == plain
    assert trained({"recompute": "full", "memory": {}}, block, way) == plain


class _Uses(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner = nn.Linear(teacher.INPUTS, teacher.INPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.relu(x))


@pytest.mark.parametrize("option", ["full", "selective"])
def test_an_input_that_the_model_changes_behind_the_block_is_refused(option):
    trained({}, _Uses, "argument", True)
    with pytest.raises(UserError, match="an input of _Uses was changed in place after its forward"):
        trained({"recompute": option}, _Uses, "argument", True)
    before = torch.random.get_rng_state()
    with pytest.raises(UserError):
        trained({"recompute": option}, _Uses, "argument", True, dropout="fused")
    assert torch.equal(torch.random.get_rng_state(), before), "the draws of the forward that failed are over"


class _Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.count = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor, pair: torch.Tensor | None = None) -> torch.Tensor:
        self.count += 1
        y = self.inner(torch.relu(x))
        if pair is not None:
            pair += 1
        if pair is not None or self.count > 1:
            x += 1
        return y


def test_what_cannot_be_repeated_is_refused():
    block, x = _Sometimes(), torch.ones(2, 4)
    Recompute([block], "full")
    block(x * 1)
    with pytest.raises(UserError, match="that its first forward had left as it was"):
        block(x * 1)
    block = _Sometimes()
    Recompute([block], "full")
    both = x * 1
    with pytest.raises(UserError, match="shares its memory with another input"):
        block(both, both[1:])


def test_no_input_outlives_the_graph():
    """A changed input belongs to the graph of the forward that keeps it, a cycle that no collector sees."""
    block = _Adds("argument")
    Recompute([block], "full")
    gc.disable()
    try:
        for _ in range(2):
            x = torch.ones(2, teacher.INPUTS, requires_grad=True) * 1
            gone = weakref.ref(x)
            y = block(x)
            del x
            assert gone() is None
            y.sum().backward()
    finally:
        gc.enable()


class _Mutates(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(teacher.INPUTS))
        self.bias = nn.Parameter(torch.zeros(teacher.INPUTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        y += self.bias
        return torch.tanh(y)


class _Gives(nn.Module):
    """Gives a product, to which the model adds in place."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(teacher.INPUTS, teacher.INPUTS, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class _Recurs(nn.Module):
    """Its loop over time changes the results of products in place, inside torch; those of nn.GRU by pieces that have a
    version of their own."""

    kind: type[nn.RNNBase] = nn.LSTM

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner = self.kind(teacher.INPUTS, teacher.INPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[None])[0][0]


class _RecursByGates(_Recurs):
    kind = nn.GRU


class _Scales(_Mutates):
    """Changes a product past its version."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        y.data.mul_(0.5)
        return torch.tanh(y + self.bias)


CHANGING = [_Mutates, _RecursByGates, _Scales]


@pytest.mark.parametrize("block", [*CHANGING, _Recurs])
def test_a_kept_result_that_is_changed_in_place_is_computed_again(block):
    assert trained({"recompute": "selective"}, block, "argument") == trained({}, block, "argument")


def test_a_kept_result_that_the_model_changes_behind_the_block_is_computed_again():
    plain = trained({}, _Gives, "argument", True)
    assert trained({"recompute": "selective"}, _Gives, "argument", True) == plain


@pytest.mark.parametrize("block", CHANGING)
def test_where_torch_cannot_compute_a_kept_result_again_it_is_refused_with_a_remedy(block, monkeypatch):
    monkeypatch.setattr(selective, "_COMPUTED_AGAIN", None)
    plain = trained({}, block, "argument")
    with pytest.raises(UserError, match=r"make that out of place .* name other operations in save, or take \"full\""):
        trained({"recompute": "selective"}, block, "argument")
    for remedy in ({"name": "selective", "save": ["attention"]}, "full"):
        assert trained({"recompute": remedy}, block, "argument") == plain


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_that_draws_in_its_kernel_is_computed_again(dropout):
    """Kept, it would not draw in the second forward, and a dropout behind it would find other draws than the first."""
    first, _ = selective.keeping(["attention"])()
    q = torch.empty(2, 4, 8, 16, device="meta", dtype=torch.bfloat16)
    with first as contexts:
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, dropout, False)
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, dropout_p=dropout)
        torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True, dropout)
        torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, q, None, True, dropout)
    entries: Any = [entry for results in contexts.storage.values() for entry in results.values()]
    assert [isinstance(entry, tuple) for entry in entries] == [not dropout] * 4
