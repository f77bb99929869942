"""Language models of transformers, by the classes that their users take."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from tests.zoo.entry import LENGTH, VOCABULARY, Microbatch, Model, cross_entropy, next_token, rows

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
BERT = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CAUSAL: dict[str, dict[str, Any]] = {
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "gemma2": {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    "gemma3_text": {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    "phi3": GROUPED,
    "olmo": GROUPED,
    "olmoe": EXPERTS,
    "mistral": {**GROUPED, "sliding_window": 4},
    "gpt_neox": SMALL,
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "apertus": GROUPED,
    "gemma4_text": {
        **GROUPED,
        "head_dim": 8,
        "global_head_dim": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "sliding_window": 4,
    },
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 4, "n_head": 4},
    "falcon": {**SMALL, "new_decoder_architecture": False, "multi_query": True, "alibi": False},
    "deepseek_v3": {
        **SMALL,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 4},
}
FP32 = ("olmoe", "deepseek_v3", "qwen2_moe")


def causal(kind: str, **fields: Any) -> nn.Module:
    """`AutoModelForCausalLM` of a configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))


def masked(kind: str, **fields: Any) -> nn.Module:
    """`AutoModelForMaskedLM` of a configuration."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    return AutoModelForMaskedLM.from_config(AutoConfig.for_model(kind, **fields))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in SIDE.items()}
    return BartForConditionalGeneration(
        BartConfig(vocab_size=VOCABULARY, d_model=32, max_position_embeddings=32, dropout=0.0, **sizes)
    )


SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}


def translation(model: nn.Module, mb: Microbatch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of a decoder that reads the row turned round."""
    result = model(input_ids=mb["input_ids"], decoder_input_ids=mb["input_ids"].flip(1))
    return cross_entropy(result.logits, mb["labels"])


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in SIDE.items()}
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            num_mel_bins=8,
            max_source_positions=LENGTH,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            **sizes,
        )
    )


def speech() -> list[dict[str, Tensor]]:
    import torch

    from tests.zoo.entry import draws

    draw = draws(2)
    return [{**row, "input_features": torch.randn(8, 2 * LENGTH, generator=draw)} for row in rows()]


def transcription(model: nn.Module, mb: Microbatch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of what is said, given the spectrogram."""
    result = model(input_features=mb["input_features"], decoder_input_ids=mb["input_ids"])
    return cross_entropy(result.logits, mb["labels"])


def lora() -> nn.Module:
    """A Llama with adapters of rank 4 on two projections of each layer, by peft."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    return get_peft_model(causal("llama", **GROUPED), adapters)  # type: ignore[arg-type]


LANGUAGE: dict[str, Model] = {
    kind: Model(partial(causal, kind, **fields), next_token, rows, "fp32" if kind in FP32 else "fp64")
    for kind, fields in CAUSAL.items()
} | {
    "bert": Model(partial(masked, "bert", **BERT), next_token, rows),
    "roberta": Model(partial(masked, "roberta", **BERT), next_token, rows),
    "t5": Model(t5, translation, rows),
    "bart": Model(bart, translation, rows),
    "whisper": Model(whisper, transcription, speech),
    "lora (peft)": Model(lora, next_token, rows),
}
