from dataclasses import replace

import pytest
import torch

from shoal.errors import UserError
from shoal.models import GPT, PRESETS, GPTConfig, export_hf
from shoal.models.hf_map import from_hf, to_hf, unmapped

GPT2 = GPTConfig(vocab_size=61, sequence=32, layers=2, d_model=32, heads=4)
LLAMA = replace(GPT2, kv_heads=2, positions="rotary", mlp="swiglu", norm="rmsnorm", bias=False, rope_theta=5000.0)

CASES = {
    "gpt2 tied": GPT2,
    "gpt2 untied": replace(GPT2, tied=False, d_ff=40, dropout=0.1),
    "llama tied": LLAMA,
    "llama untied": replace(LLAMA, tied=False, kv_heads=None, norm_eps=1e-6),
    "llama bias": replace(LLAMA, bias=True),
}


def model_of(cfg):
    model = GPT(cfg)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize("cfg", CASES.values(), ids=CASES)
def test_transformers_gives_the_same_logits(cfg, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = model_of(cfg).double()
    export_hf(ours, ours.state_dict(), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    ids = torch.randint(0, 61, (2, 9))
    # The RMSNorm of transformers computes in fp32 even for fp64 weights.
    torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=0, atol=1e-12 if cfg.norm == "layernorm" else 2e-6)

    back, weights = from_hf(theirs.config.to_dict(), theirs.state_dict())
    assert replace(back, d_ff=None, kv_heads=None) == replace(cfg, d_ff=None, kv_heads=None)
    assert (back.ff, back.key_value_heads) == (cfg.ff, cfg.key_value_heads)
    assert weights.keys() == ours.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in ours.state_dict().items())


@pytest.mark.fast
def test_layouts_by_hand():
    model = model_of(GPT2)
    _, weights = to_hf(GPT2, model.state_dict())
    assert weights["transformer.h.1.attn.c_attn.weight"].shape == (32, 96)
    assert torch.equal(weights["transformer.h.1.mlp.c_fc.weight"], model.blocks[1].mlp.up.weight.T)
    assert torch.equal(weights["transformer.wpe.weight"], model.position_embedding.weight)
    assert "lm_head.weight" not in weights
    model = model_of(LLAMA)
    _, weights = to_hf(LLAMA, model.state_dict())
    assert torch.equal(weights["model.layers.0.self_attn.k_proj.weight"], model.blocks[0].attention.qkv.weight[32:48])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"positions": "rotary"}, "positions='rotary', mlp='gelu' and norm='layernorm' together"),
        ({"bias": False}, "bias=False"),
        ({"kv_heads": 2}, "kv_heads=2 for heads=4"),
    ],
)
def test_what_has_no_equivalent_says_why(fields, reason):
    cfg = replace(GPT2, **fields)
    assert reason in str(unmapped(cfg))
    with pytest.raises(UserError, match="cannot be written as a model of transformers"):
        to_hf(cfg, {})


@pytest.mark.fast
def test_every_preset_has_an_equivalent():
    assert [name for name, cfg in PRESETS.items() if unmapped(cfg)] == []


@pytest.mark.fast
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "type 'mamba'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type='linear'"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"head_dim": 16}, "head_dim=16"),
        ({"mlp_bias": True}, "mlp_bias=True"),
    ],
)
def test_a_model_that_we_have_not_is_refused(change, message):
    config, weights = to_hf(LLAMA, GPT(LLAMA).state_dict())
    from_hf(config, weights)
    with pytest.raises(UserError) as error:
        from_hf({**config, **change}, weights)
    assert message in str(error.value)
