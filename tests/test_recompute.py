"""Recompute: the same numbers (tests/parity) with fewer activations kept, and options that are refused by name."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from shoal import Engine, Plan, UserError
from shoal.compiling import recomputable
from shoal.models import GPT, MLP, GPTConfig, regression
from shoal.recompute import recompute
from tests.exchange import teacher

LAYERS = 4


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=61, sequence=32, layers=LAYERS, d_model=32, heads=4))


def kept(option: object, steps: int = 2) -> tuple[int, list[int]]:
    """Bytes that autograd keeps of one forward, weights not counted, and which blocks are computed again; in the last of `steps` forwards."""
    torch.manual_seed(0)
    model = gpt()
    chosen = recompute(recomputable(model), option)  # type: ignore[arg-type]
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
    output.sum().backward()
    return sum(found.values()), chosen()


def test_what_is_kept():
    everything, none = kept("none")
    full, blocks = kept("full")
    assert none == [] and blocks == list(range(LAYERS))
    # torch's checkpoint keeps the inputs beside autograd, which sees nothing of the blocks but the head and the embedding
    assert full < 0.2 * everything
    half, which = kept({"name": "blocks", "every": 2})
    assert which == [0, 2] and full < half < everything
    budget, which = kept({"name": "budget", "keep": 0.5})
    assert 1 <= len(which) < LAYERS and budget < 0.75 * everything
    assert kept({"name": "budget", "keep": 1})[1] == [] and kept({"name": "budget", "keep": 0})[1] == list(range(LAYERS))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("ful", 'plan.recompute = "ful" is not one of none, full, blocks, selective, budget. Did you mean "full"?'),
        ({"name": "blocks"}, "give either which = [places] or every = 2"),
        ({"name": "blocks", "which": [9]}, "which = [9]: the model has the blocks 0 to 3"),
        ({"name": "selective", "save": ["matmull"]}, "save = ['matmull']: give a list of matmul, attention, convolution"),
        ({"name": "budget", "keep": 2}, "keep = 2: give the part of the bytes to keep, 0 to 1"),
        ({"name": "budget", "part": 2}, "unexpected keyword argument 'part'"),
    ],
)
def test_wrong_options_are_refused_by_name(option, message):
    with pytest.raises(UserError) as error:
        recompute(recomputable(gpt()), option)
    assert message in str(error.value)


def test_a_model_without_repeated_parts_is_told():
    with pytest.raises(UserError, match=r"repeated blocks .* has none"):
        recomputable(nn.LSTM(3, 4))
    assert len(recomputable(MLP((10, 32, 3), "tanh", 0.0))) > 1


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


@pytest.mark.parametrize("option", ["full", "selective", {"name": "budget", "keep": 0.5}], ids=["full", "selective", "budget"])
def test_compiled_blocks_are_computed_again_as_well(option):
    losses = {}
    for name, plan in (("plain", Plan()), ("compiled", Plan(compile="aot_eager", recompute=option))):
        running = Engine(
            partial(MLP, (teacher.INPUTS, 24, 24, teacher.OUTPUTS), "tanh", 0.0), regression, teacher.ADAMW, plan, global_batch=16, microbatch=8
        )  # fmt: skip
        losses[name] = [running.step(batch).loss for batch in running.batches(teacher.data(), steps=3)]
        running.close()
    assert losses["compiled"] == pytest.approx(losses["plain"], rel=1e-6)
