import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UserError
from shoal.models import GPT, PRESETS, GPTConfig, count_parameters, flops_per_token, generate
from shoal.models.generate import context_length

GPT2 = GPTConfig(vocab_size=61, sequence=32, layers=2, d_model=32, heads=4)
LLAMA = replace(GPT2, kv_heads=2, positions="rotary", mlp="swiglu", norm="rmsnorm", tied=False, bias=False)
BOTH = pytest.mark.parametrize("cfg", [GPT2, LLAMA], ids=["gpt2", "llama"])


def spread(model):
    """Large weights, so that a change anywhere shows in the logits."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


@pytest.mark.fast
@pytest.mark.parametrize("name", PRESETS)
def test_count_is_the_real_one(name):
    cfg = PRESETS[name]
    with torch.device("meta"):
        model = GPT(cfg)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(cfg)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("1m", 1.1),
        ("5m", 4.9),
        ("15m", 15.7),
        ("33m", 33.7),
        ("124m", 124.4),
        ("350m", 355.9),
        ("1.3b", 1315.7),
        ("13b", 12863.5),
    ],
)
def test_preset_has_its_size(name, millions):
    assert round(count_parameters(PRESETS[name]) / 1e6, 1) == millions


@given(
    positions=st.sampled_from(["learned", "rotary"]),
    mlp=st.sampled_from(["gelu", "swiglu"]),
    norm=st.sampled_from(["layernorm", "rmsnorm"]),
    tied=st.booleans(),
    bias=st.booleans(),
    kv_heads=st.sampled_from([None, 1, 2, 4]),
    d_ff=st.sampled_from([None, 24]),
)
def test_count_of_any_configuration(**fields):
    cfg = replace(GPT2, **fields)
    with torch.device("meta"):
        model = GPT(cfg)
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(cfg)
    assert model(torch.zeros(2, 5, dtype=torch.long, device="meta")).shape == (2, 5, 61)


@pytest.mark.fast
def test_flops_by_hand():
    # One block: qkv 32 x 96, out 32 x 32, MLP 2 x 32 x 128 = 12288; two of them and the head 61 x 32 = 26528 weights, 6
    # FLOPs each.
    # Scores and their use: 2 products x 2 FLOPs x 3 (forward, backward twice) x 2 layers x width 32 x 8 tokens.
    assert flops_per_token(GPT2, 8) == 6 * 26_528 + 12 * 2 * 32 * 8


@pytest.mark.fast
@BOTH
def test_a_token_sees_only_the_past(cfg):
    model = spread(GPT(cfg))
    ids = torch.randint(0, 61, (2, 10))
    other = ids.clone()
    other[:, 6] = (other[:, 6] + 1) % 61
    changed = (model(ids) != model(other)).any(-1)
    assert not changed[:, :6].any()
    assert changed[:, 6:].all()


@BOTH
def test_documents_of_a_row_are_as_if_alone(cfg):
    model = spread(GPT(cfg))
    ids = torch.randint(0, 61, (1, 12))
    lengths = [5, 3, 4]
    document_ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = model(ids, position_ids=position_ids, document_ids=document_ids)
    alone = torch.cat([model(piece) for piece in ids.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)


def test_grouped_heads_are_shared_heads():
    grouped, full = spread(GPT(LLAMA)), spread(GPT(replace(LLAMA, kv_heads=4)))
    weights = grouped.state_dict()
    for name in [name for name in weights if name.endswith("qkv.weight")]:
        q, k, v = weights[name].split((32, 16, 16))
        k, v = (x.unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1) for x in (k, v))
        weights[name] = torch.cat((q, k, v))
    full.load_state_dict(weights)
    ids = torch.randint(0, 61, (2, 7))
    torch.testing.assert_close(full(ids), grouped(ids), rtol=0, atol=1e-12)


def test_rotary_positions_are_relative():
    model = spread(GPT(LLAMA))
    ids = torch.randint(0, 61, (1, 8))
    at = torch.arange(8)[None]
    # Angles are fp32: a shift of 5 changes their rounding.
    torch.testing.assert_close(model(ids, position_ids=at), model(ids, position_ids=at + 5), rtol=0, atol=1e-4)
    assert (model(ids, position_ids=at) - model(ids, position_ids=at * 2)).abs().max() > 1e-2


@pytest.mark.fast
def test_initialisation_is_that_of_gpt2():
    model = GPT(replace(GPT2, d_model=256, layers=8, vocab_size=512))
    block = model.blocks[3]
    for weight, std in [
        (model.token_embedding.weight, 0.02),
        (model.position_embedding.weight, 0.02),
        (block.attention.qkv.weight, 0.02),
        (block.mlp.up.weight, 0.02),
        (block.attention.out.weight, 0.02 / math.sqrt(16)),
        (block.mlp.down.weight, 0.02 / math.sqrt(16)),
    ]:
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert block.attention.qkv.bias.abs().max() == 0
    assert model.head.weight is model.token_embedding.weight


@BOTH
def test_dropout_acts_while_training_alone(cfg):
    model = GPT(replace(cfg, dropout=0.5))
    ids = torch.randint(0, 61, (1, 8))
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 5}, "heads = 5 of GPT does not divide d_model = 32"),
        ({"kv_heads": 3}, "kv_heads = 3 of GPT does not divide heads = 4"),
        ({"layers": 0}, "layers = 0 of GPT must be greater than 0"),
        ({"d_ff": 0}, "d_ff = 0 of GPT must be greater than 0"),
        ({"kv_heads": 0}, "kv_heads = 0 of GPT must be greater than 0"),
        ({"rope_theta": float("nan")}, "rope_theta = nan of GPT must be greater than 0"),
        ({"rope_theta": 5e5}, 'rope_theta = 500000.0 of GPT is of rotary positions: give positions = "rotary" too'),
        (
            {"positions": "rotory"},
            "positions = 'rotory' of GPT is none of 'learned', 'rotary'. Did you mean \"rotary\"?",
        ),
        ({"dropout": 1.0}, "dropout = 1.0 of GPT must be at least 0 and below 1"),
        ({"positions": "rotary", "heads": 32}, "choose an even head size"),
    ],
)
def test_a_wrong_configuration_is_explained(fields, message):
    with pytest.raises(UserError) as error:
        replace(GPT2, **fields)
    assert message in str(error.value)


@pytest.mark.fast
def test_a_row_too_long_is_explained():
    with pytest.raises(UserError, match="a row of 33 tokens was given to a model of sequence=32"):
        GPT(GPT2)(torch.zeros(1, 33, dtype=torch.long))


class Counter(torch.nn.Module):
    """Likes the successor of the last token best, then the one after that."""

    def forward(self, ids):
        logits = torch.zeros(*ids.shape, 10)
        logits.scatter_(-1, ((ids + 1) % 10)[..., None], 9.0)
        return logits.scatter_(-1, ((ids + 2) % 10)[..., None], 8.0)


@pytest.mark.fast
def test_generate_greedy_and_top_k():
    prompt = torch.tensor([[3], [7]])
    for options in ({"temperature": 0.0}, {"top_k": 1}):
        assert generate(Counter(), prompt, 4, **options).tolist() == [[3, 4, 5, 6, 7], [7, 8, 9, 0, 1]]
    for cold in (1e-3, 1e-37, 1e-45, 1e-300):
        assert generate(Counter(), prompt, 4, cold).tolist() == generate(Counter(), prompt, 4, 0.0).tolist()
    drawn = generate(Counter(), prompt, 40, temperature=100.0, top_k=2)
    assert set((drawn.diff(dim=1) % 10).flatten().tolist()) == {1, 2}


@pytest.mark.fast
def test_generate_is_drawn_from_its_generator_and_crops():
    model = GPT(GPT2)
    prompt = torch.randint(0, 61, (1, 30))
    one, two = (generate(model, prompt, 8, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, two)
    assert one.shape == (1, 38)  # past the 32 that the model takes at once
    assert model.training
    assert context_length(model) == 32
    with pytest.raises(UserError, match="at least one"):
        generate(model, prompt[:, :0], 1)
    for temperature in (-1.0, math.nan, math.inf):
        with pytest.raises(UserError, match=f"temperature = {temperature}: give a number from 0 up"):
            generate(model, prompt, 1, temperature)
    with pytest.raises(UserError, match="top_k = 0: give at least 1"):
        generate(model, prompt, 1, top_k=0)
