import json
import socket
import subprocess
import sys

import pytest
import torch

from shoal.errors import UserError
from shoal.models import GPT, GPTConfig, build, causal_lm, export_hf, from_config
from shoal.models.hf import flops_per_token
from shoal.models.hf_config import config_of

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
CONFIGS = {
    "gpt2": {"model_type": "gpt2", "vocab_size": 61, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": {"model_type": "llama", **SMALL},
    "llama tied": {"model_type": "llama", **SMALL, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **SMALL},
    "qwen3": {"model_type": "qwen3", **SMALL, "head_dim": 8},
    "mixtral": {"model_type": "mixtral", **SMALL, "num_local_experts": 4},
}
FULL = "full_attention"
EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.fixture
def offline(monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_a_value_is_replaced_whichever_name_it_has():
    """`n_layer` in a job did not count where the file had `num_hidden_layers`."""
    file = {**CONFIGS["gpt2"], "num_hidden_layers": 3}
    assert config_of(file).n_layer == 3
    for given in ({"n_layer": 1}, {"num_hidden_layers": 1}, {"n_layer": 1, "num_hidden_layers": 5}):
        assert config_of(file, **given).n_layer == config_of(CONFIGS["gpt2"], **given).n_layer == 1


def test_a_configuration_that_has_no_defaults_is_refused_in_our_words(monkeypatch):
    def refuse(*_):
        raise TypeError("no such size")

    monkeypatch.setattr(transformers.AutoConfig, "for_model", refuse)
    with pytest.raises(UserError, match="The configuration of the gpt2 is refused by transformers: no such size"):
        config_of({"model_type": "gpt2"})


@EACH
def test_factory_builds_trains_and_needs_no_network(config, offline):
    factory = from_config(config)
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in factory().named_parameters()}
    model = factory()
    assert shapes == {name: parameter.shape for name, parameter in model.named_parameters()}
    ids = torch.randint(0, 61, (2, 9))
    total, count, *_ = causal_lm(model, {"input_ids": ids, "labels": ids})
    total.backward()
    assert count == 18
    assert model.config._attn_implementation == "sdpa"
    assert "past_key_values" not in model(ids)
    assert all(parameter.grad is not None for parameter in model.parameters())


@EACH
def test_export_is_read_by_from_pretrained(config, tmp_path, offline):
    model = from_config(config)().eval()
    # As an engine keeps them: views of one flat storage, each tied weight once.
    names, tensors = zip(*model.named_parameters(), strict=True)
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    pieces = flat.split([tensor.numel() for tensor in tensors])
    weights = {name: piece.view_as(tensor) for name, piece, tensor in zip(names, pieces, tensors, strict=True)}
    with torch.device("meta"):
        architecture = from_config(config)()
    export_hf(architecture, weights, tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    size = sum(tensor.nbytes for tensor in tensors)
    assert (tmp_path / "model.safetensors").stat().st_size < size + 16_384  # a tied weight is there once
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.randint(0, 61, (2, 9))
    assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)
    assert loaded.config.use_cache


@EACH
def test_packed_documents_do_not_see_each_other(config):
    model = from_config(config)().eval()
    ids = torch.randint(0, 61, (2, 9))
    other = ids.clone()
    other[:, 1] = (other[:, 1] + 1) % 61
    at = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)
    difference = (model(ids, position_ids=at).logits - model(other, position_ids=at).logits).abs().amax(-1)
    # Not bitwise: experts multiply the tokens of both documents together, in another grouping.
    changed = difference > 1e-5
    assert changed[:, 1:4].all()
    assert not changed[:, 4:].any()


OTHERS = {
    "bert": (transformers.BertForSequenceClassification, {**SMALL, "num_labels": 3}),
    "masked": (transformers.BertForMaskedLM, SMALL),
    "t5": (transformers.T5ForConditionalGeneration, {"vocab_size": 61, "d_model": 32, "d_ff": 48, "num_layers": 2}),
    "vit": (transformers.ViTForImageClassification, {**SMALL, "image_size": 32, "patch_size": 8, "num_labels": 3}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_models_that_are_no_causal_ones_are_exported_as_their_own_class(kind, tmp_path):
    model_class, fields = OTHERS[kind]
    model = model_class(model_class.config_class(**fields))
    export_hf(model, {name: tensor.clone() for name, tensor in model.named_parameters()}, tmp_path)
    loaded, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [model_class.__name__]
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(tensor.equal(loaded.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_export_keeps_low_precision(tmp_path):
    model = from_config(CONFIGS["llama"])().bfloat16()
    export_hf(model.config, model.state_dict(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_export_of_frozen_weights_in_low_precision_rounds_no_others(tmp_path):
    """As an engine has them under bf16, of which the first one is frozen."""
    model = from_config(CONFIGS["llama"])()
    model.model.embed_tokens.bfloat16()
    export_hf(model, model.state_dict(), tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.model.embed_tokens.weight.equal(model.model.embed_tokens.weight.float())
    assert loaded.lm_head.weight.equal(model.lm_head.weight)


def test_mixture_of_experts_returns_its_balance_loss():
    model = from_config({**CONFIGS["mixtral"], "router_aux_loss_coef": 0.5})()
    ids = torch.randint(0, 61, (2, 9))
    _, _, auxiliary = causal_lm(model, {"input_ids": ids, "labels": ids})
    # Balanced experts give top_k = 2 (two of four experts a token); a fresh router is nearly balanced.
    assert auxiliary["router"].item() == pytest.approx(0.5 * 2, rel=0.1)
    assert auxiliary["router"].requires_grad


def test_config_comes_from_a_file_a_directory_or_a_table(tmp_path):
    path = tmp_path / "config.json"
    published = {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "auto_map": {"AutoModelForCausalLM": "x.Y"},
    }
    path.write_text(json.dumps({**CONFIGS["llama"], **published}))
    for source in (path, str(tmp_path), CONFIGS["llama"]):
        model = from_config(source, vocab_size=257)()
        assert model.lm_head.weight.shape == (257, 32)
        assert model.dtype == torch.float32


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        ({"model_type": "lama"}, {}, 'Did you mean "llama"?'),
        ({}, {}, "model_type=None"),
        (CONFIGS["llama"], {"hiden_size": 64}, 'Did you mean "hidden_size"?'),
        ({**CONFIGS["llama"], "quantization_config": {"bits": 4}}, {}, "quantization_config"),
        ("no/such.json", {}, "no/such.json cannot be read"),
        (CONFIGS["llama"], {"hidden_size": "wide"}, "The configuration of the llama is refused by transformers"),
        (CONFIGS["llama"], {"vocab_size": "many"}, "The configuration of the llama is refused by transformers"),
        (CONFIGS["llama"], {"hidden_size": 33}, "The configuration of the llama is refused by transformers"),
    ],
)
def test_a_wrong_configuration_is_explained(config, overrides, message):
    with pytest.raises(UserError) as error:
        from_config(config, **overrides)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "wrong", [{"hidden_act": "nothing"}, {"hidden_size": -32, "head_dim": 8}, {"intermediate_size": -1}]
)
def test_sizes_that_make_no_model_are_explained(wrong):
    factory = from_config({**CONFIGS["llama"], **wrong})
    for device in ("meta", "cpu"):
        with pytest.raises(UserError, match="transformers makes no llama of this configuration"), torch.device(device):
            factory()


def test_a_model_without_attention_is_counted_by_its_matrices():
    config = {"model_type": "mamba", "vocab_size": 61, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
    spec = build({"name": "hf", "config": config})
    matrices = sum(each.numel() for each in spec.factory().parameters() if each.dim() >= 2)
    assert spec.flops_per_token(8) == spec.flops_per_token(99) == 6 * matrices


def test_layers_of_several_widths_are_counted_each():
    config = CONFIGS["llama"] | {"model_type": "gemma4_text", "head_dim": 8, "layer_types": ["sliding_attention", FULL]}
    config |= {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 61}
    wide, even = (flops_per_token(config_of({**config, "global_head_dim": width})) for width in (16, 8))
    assert wide(9) - wide(8) == 12 * (4 * 8 + 4 * 16) and even(9) - even(8) == 12 * 2 * 4 * 8


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[1]", "holds a list")])
def test_a_broken_file_is_explained(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        from_config(tmp_path)


def test_weights_that_do_not_fit_are_named(tmp_path):
    model = from_config(CONFIGS["llama"])()
    weights = model.state_dict()
    del weights["model.norm.weight"]
    with pytest.raises(UserError, match=r"missing \['model.norm.weight'\]"):
        export_hf(model, weights, tmp_path)
    with pytest.raises(UserError, match="A Linear has no equivalent"):
        export_hf(torch.nn.Linear(2, 2), {}, tmp_path)


def test_a_package_that_a_model_needs_is_named(monkeypatch):
    def lacking(*_, **__):
        raise ImportError("\nTimmWrapperModel requires the timm library but it was not found in your environment.")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", lacking)
    with pytest.raises(UserError, match="llama of transformers needs another package: TimmWrapperModel requires the"):
        from_config(CONFIGS["llama"])()


def test_transformers_missing_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install 'shoal\[hf\]'"):
        from_config(CONFIGS["llama"])


def test_flops_by_hand():
    # GPT-2: two blocks of 12 x 32^2, head 61 x 32; Mixtral: attention 3072, router 128, half of the experts 3 x 4 x 32
    # x 48.
    assert flops_per_token(config_of(CONFIGS["gpt2"]))(8) == 6 * (2 * 12 * 1024 + 1952) + 12 * 2 * 32 * 8
    assert flops_per_token(config_of(CONFIGS["mixtral"]))(8) == 6 * (2 * (3072 + 128 + 9216) + 1952) + 12 * 2 * 32 * 8


def test_flops_agree_with_our_own_gpt(tmp_path):
    model = build({"name": "gpt", "preset": "1m"})
    gpt = model.factory()
    export_hf(gpt, gpt.state_dict(), tmp_path)
    theirs = build({"name": "hf", "config": str(tmp_path), "weights": "none"})
    assert theirs.flops_per_token(256) == model.flops_per_token(256)
    assert (theirs.vocab_size, theirs.sequence) == (model.vocab_size, model.sequence)


def test_export_of_a_large_model_is_in_parts(tmp_path, monkeypatch):
    cfg = GPTConfig(vocab_size=61, sequence=32, layers=2, d_model=32, heads=4)
    save = transformers.GPT2LMHeadModel.save_pretrained
    monkeypatch.setattr(
        transformers.GPT2LMHeadModel,
        "save_pretrained",
        lambda self, d, **kw: save(self, d, **{**kw, "max_shard_size": "40KB"}),
    )
    gpt = GPT(cfg).eval()
    export_hf(cfg, gpt.state_dict(), tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(0, 61, (1, 5))
    torch.testing.assert_close(loaded(ids).logits, gpt(ids))


def test_models_come_without_transformers():
    code = "import sys, shoal.models; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
