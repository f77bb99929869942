"""Converts our GPT to a model of `transformers` and back: the same function, with other names and layouts of weights.

- learned positions, GELU, LayerNorm, bias, as many key/value heads as heads: GPT-2. Its `Conv1D` keeps matrices as
  [in, out], ours are [out, in].
- rotary positions, SwiGLU, RMSNorm: Llama. Its queries, keys and values are three matrices, ours the rows of one.

Nothing here imports `transformers`: a configuration is the dict of a `config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UserError
from shoal.models.gpt import GPTConfig

StateDict = dict[str, Tensor]

_GPT2_TOP = {
    "token_embedding.weight": "transformer.wte.weight",
    "position_embedding.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}
_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_LLAMA_TOP = {
    "token_embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_LLAMA_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def unmapped(cfg: GPTConfig) -> str | None:
    """Returns None where `cfg` has an equivalent in `transformers`, else the reason why not."""
    kind = (cfg.positions, cfg.mlp, cfg.norm)
    if cfg.moe is not None:
        return "it has experts, whose routing differs from model to model there"
    if kind == ("rotary", "swiglu", "rmsnorm"):
        return None
    if kind != ("learned", "gelu", "layernorm"):
        return (
            f"no model of transformers has positions={cfg.positions!r}, mlp={cfg.mlp!r} and norm={cfg.norm!r} "
            "together; learned + gelu + layernorm is GPT-2, rotary + swiglu + rmsnorm is Llama"
        )
    if not cfg.bias:
        return "GPT-2 has biases everywhere, this model has bias=False"
    if cfg.key_value_heads != cfg.heads:
        return f"GPT-2 has no grouped queries, this model has kv_heads={cfg.key_value_heads} for heads={cfg.heads}"
    return None


def to_hf(cfg: GPTConfig, state_dict: Mapping[str, Tensor]) -> tuple[dict[str, Any], StateDict]:
    """Returns the `config.json` and the weights of the equivalent model, which gives the same logits.

    A tied head is left out, as `transformers` expects. Raises `UserError` with `unmapped`'s reason where there is no
    equivalent.
    """
    if reason := unmapped(cfg):
        raise UserError(f"This GPT cannot be written as a model of transformers: {reason}.")
    weights = {name: tensor for name, tensor in state_dict.items() if not (cfg.tied and name == "head.weight")}
    if cfg.positions == "learned":
        return _gpt2_config(cfg), {_gpt2_name(name): _gpt2_layout(name, tensor) for name, tensor in weights.items()}
    mapped: StateDict = {}
    for name, tensor in weights.items():
        mapped.update(_llama_tensors(cfg, name, tensor))
    return _llama_config(cfg), mapped


def from_hf(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> tuple[GPTConfig, StateDict]:
    """Returns the `GPTConfig` and the weights of a GPT-2 or Llama given by its `config.json` and the names of its
    `...ForCausalLM`.

    Raises `UserError` where the configuration has what our GPT has not (another `model_type`, scaled rotary positions,
    ...).
    """
    readers = {"gpt2": _read_gpt2, "llama": _read_llama}
    kind = config.get("model_type")
    if kind not in readers:
        raise UserError(
            f"A model of type {kind!r} cannot be read as a GPT of Shoal; gpt2 and llama can. Train it as it is: name "
            "= 'hf'."
        )
    cfg, weights = readers[kind](config, state_dict)
    if cfg.tied:
        weights["head.weight"] = weights["token_embedding.weight"]
    return cfg, weights


# ---- GPT-2 ----


def _gpt2_config(cfg: GPTConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": cfg.vocab_size,
        "n_positions": cfg.sequence,
        "n_embd": cfg.d_model,
        "n_layer": cfg.layers,
        "n_head": cfg.heads,
        "n_inner": cfg.ff,
        "activation_function": "gelu_new",
        "resid_pdrop": cfg.dropout,
        "embd_pdrop": cfg.dropout,
        "attn_pdrop": cfg.dropout,
        "layer_norm_epsilon": cfg.norm_eps,
        "tie_word_embeddings": cfg.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _gpt2_name(name: str) -> str:
    if not name.startswith("blocks."):
        return _GPT2_TOP[name]
    index, module, kind = _split(name)
    return f"transformer.h.{index}.{_GPT2_BLOCK[module]}.{kind}"


def _gpt2_layout(name: str, tensor: Tensor) -> Tensor:
    """Transposes the four matrices of a block that GPT-2 keeps in a `Conv1D`; its own inverse."""
    return tensor.t() if name.startswith("blocks.") and tensor.dim() == 2 else tensor


def _read_gpt2(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> tuple[GPTConfig, StateDict]:
    # The tanh form of GELU has three names in transformers.
    _expect(config, "activation_function", "gelu_new", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")
    _expect(config, "scale_attn_by_inverse_layer_idx", False, False)
    _expect(config, "scale_attn_weights", True, True)
    dropout = config.get("resid_pdrop", 0.1)
    _expect(config, "embd_pdrop", 0.1, dropout)
    _expect(config, "attn_pdrop", 0.1, dropout)
    cfg = GPTConfig(
        vocab_size=config["vocab_size"],
        sequence=config["n_positions"],
        layers=config["n_layer"],
        d_model=config["n_embd"],
        heads=config["n_head"],
        d_ff=config.get("n_inner"),
        tied=config.get("tie_word_embeddings", True),
        dropout=dropout,
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
    )
    names = _our_names(cfg, _GPT2_TOP, [*_GPT2_BLOCK], ("weight", "bias"))
    return cfg, {name: _gpt2_layout(name, state_dict[_gpt2_name(name)]) for name in names}


# ---- Llama ----


def _llama_config(cfg: GPTConfig) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": cfg.vocab_size,
        "max_position_embeddings": cfg.sequence,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.ff,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.key_value_heads,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "rope_theta": cfg.rope_theta,  # where transformers < 5 looks
        "attention_bias": cfg.bias,
        "mlp_bias": cfg.bias,
        # Llama drops nothing in the residual stream: `dropout` acts there only while training, so the function is the
        # same.
        "attention_dropout": cfg.dropout,
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": cfg.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _llama_tensors(cfg: GPTConfig, name: str, tensor: Tensor) -> StateDict:
    if not name.startswith("blocks."):
        return {_LLAMA_TOP[name]: tensor}
    index, module, kind = _split(name)
    if module != "attention.qkv":
        return {f"model.layers.{index}.{_LLAMA_BLOCK[module]}.{kind}": tensor}
    rows = [heads * cfg.head_size for heads in (cfg.heads, cfg.key_value_heads, cfg.key_value_heads)]
    return {
        f"model.layers.{index}.{part}.{kind}": piece for part, piece in zip(_LLAMA_QKV, tensor.split(rows), strict=True)
    }


def _read_llama(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> tuple[GPTConfig, StateDict]:
    rope = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta", 10_000.0),
        **(config.get("rope_scaling") or {}),
    }
    _expect(rope, "rope_type", "default", "default")
    _expect(config, "hidden_act", "silu", "silu")
    _expect(config, "pretraining_tp", 1, 1)
    bias = config.get("attention_bias", False)
    _expect(config, "mlp_bias", False, bias)
    cfg = GPTConfig(
        vocab_size=config["vocab_size"],
        sequence=config["max_position_embeddings"],
        layers=config["num_hidden_layers"],
        d_model=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads"),
        positions="rotary",
        mlp="swiglu",
        norm="rmsnorm",
        d_ff=config["intermediate_size"],
        tied=config.get("tie_word_embeddings", False),
        bias=bias,
        dropout=config.get("attention_dropout", 0.0),
        rope_theta=rope["rope_theta"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
    )
    if config.get("head_dim") is not None:
        _expect(config, "head_dim", None, cfg.head_size)
    names = _our_names(cfg, _LLAMA_TOP, [*_LLAMA_BLOCK, "attention.qkv"], ("weight", "bias") if bias else ("weight",))
    weights: StateDict = {}
    for name in names:
        index, module, kind = _split(name) if name.startswith("blocks.") else ("", "", "")
        if module == "attention.qkv":
            weights[name] = torch.cat([state_dict[f"model.layers.{index}.{part}.{kind}"] for part in _LLAMA_QKV])
        elif module:
            weights[name] = state_dict[f"model.layers.{index}.{_LLAMA_BLOCK[module]}.{kind}"]
        else:
            weights[name] = state_dict[_LLAMA_TOP[name]]
    return cfg, weights


# ---- Both ----


def _split(name: str) -> tuple[str, str, str]:
    """Splits 'blocks.3.mlp.up.weight' into ('3', 'mlp.up', 'weight')."""
    _, index, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    return index, module, kind


def _our_names(cfg: GPTConfig, top: Mapping[str, str], modules: list[str], kinds: tuple[str, ...]) -> list[str]:
    """Returns the names of our parameters without a tied head; an RMSNorm has only a weight."""
    names = [name for name in top if not (cfg.tied and name == "head.weight")]
    for index in range(cfg.layers):
        for module in modules:
            own = ("weight",) if cfg.norm == "rmsnorm" and module.endswith("norm") else kinds
            names += [f"blocks.{index}.{module}.{kind}" for kind in own]
    return names


def _expect(config: Mapping[str, Any], key: str, default: Any, *allowed: Any) -> None:
    value = config.get(key, default)
    if value not in allowed:
        raise UserError(
            f"A GPT of Shoal has no {key}={value!r} (it has {' or '.join(map(repr, allowed))}). Train it as it is: "
            "name = 'hf'."
        )
