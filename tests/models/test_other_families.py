"""Models of `transformers` that nobody here wrote, cut among ranks: each against one process."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Engine, Plan
from shoal.models import from_config
from tests.pool import run_ranks

pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {**SMALL, "attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "olmoe": {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False},
    "olmo2": SMALL,
    "llama": SMALL,
}
STEPS, ROWS, TOKENS = 3, 4, 8
SGD = partial(torch.optim.SGD, lr=0.2)


class LoRA(nn.Module):
    """A linear layer with a low-rank adapter beside it, as the library peft names its parts."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base_layer.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * 2.0


def model(name: str) -> nn.Module:
    built = from_config({"model_type": name.removesuffix("+lora"), **MODELS[name.removesuffix("+lora")]})()
    if name.endswith("+lora"):
        built.requires_grad_(False)
        for layer in built.model.layers:
            for owner, key in [
                (layer.self_attn, "q_proj"),
                (layer.self_attn, "v_proj"),
                (layer.self_attn, "o_proj"),
                (layer.mlp, "down_proj"),
            ]:
                setattr(owner, key, LoRA(getattr(owner, key)))
    return built


def data() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    rows = torch.randint(1, 61, (ROWS, TOKENS + 1), generator=draw)
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]


def loss(module: nn.Module, mb: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = module(input_ids=mb["input_ids"], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), mb["labels"].flatten(), reduction="sum"), mb["labels"].numel()


def trained(world, name: str, plan: dict[str, Any], rules: dict[str, str] | None) -> list[float]:
    options: dict[str, Any] = {"global_batch": ROWS, "microbatch": 2, "tensor_rules": rules, "world": world}
    running = Engine(partial(model, name), loss, SGD, Plan(**plan), **options)
    results = [running.step(batch) for batch in running.batches(data(), steps=STEPS)]
    found = [number for each in results for number in (each.loss, each.grad_norm)]
    running.close()
    return found


@cache
def alone(name: str) -> list[float]:
    return run_ranks(trained, 1, name, {}, None)[0]


LORA = {
    "**.self_attn": "attention",
    "**.q_proj": "whole",
    "**.v_proj": "whole",
    "**.o_proj": "whole",
    "**.down_proj": "whole",
    "**.q_proj.base_layer": "column",
    "**.v_proj.base_layer": "column",
    "**.o_proj.base_layer": "row",
    "**.down_proj.base_layer": "row",
    "**.lora_A.*": "whole",
    "**.lora_B.*": "whole",
    "**.q_proj.lora_B.*": "column",
    "**.v_proj.lora_B.*": "column",
    "**.o_proj.lora_A.*": "row",
    "**.down_proj.lora_A.*": "row",
}
UNFUSED = {"**.self_attn": "whole", "**.qkv_proj": "gathered", "**.self_attn.o_proj": "split"}
EXPERTS_ALONE = {"**.q_proj": "whole", "**.k_proj": "whole", "**.v_proj": "whole", "**.o_proj": "whole"}
TENSOR: list[tuple[str, dict[str, str] | None]] = [
    ("phi3", None),
    ("phi3", UNFUSED),
    ("olmoe", None),
    ("olmoe", EXPERTS_ALONE),
    ("olmo2", None),
    ("llama+lora", LORA),
]


@pytest.mark.parametrize(("name", "rules"), TENSOR)
def test_a_model_of_others_cut_among_ranks_equals_one_process(name, rules):
    for found in run_ranks(trained, 2, name, {"tp": 2}, rules):
        assert found == pytest.approx(alone(name), rel=2e-5)


ENCODER = {key: value for key, value in SMALL.items() if key != "vocab_size"}
CUT: dict[str, tuple[dict[str, Any], str]] = {
    "opt": ({**SMALL, "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}, "AutoModelForCausalLM"),
    "bert": ({**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, "AutoModelForMaskedLM"),
    "vit": (
        {**ENCODER, "image_size": 8, "patch_size": 4, "num_labels": 5, "hidden_dropout_prob": 0.0},
        "AutoModelForImageClassification",
    ),
}


def whole(name: str) -> nn.Module:
    import transformers

    config, kind = CUT[name]
    return getattr(transformers, kind).from_config(transformers.AutoConfig.for_model(name, **config))


def images() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(6)
    return [
        {"pixel_values": torch.randn(3, 8, 8, generator=draw), "labels": torch.randint(0, 5, (), generator=draw)}
        for _ in range(ROWS)
    ]


def of_logits(module: nn.Module, mb: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = module(**{key: value for key, value in mb.items() if key != "labels"}).logits
    return F.cross_entropy(logits.flatten(0, -2).float(), mb["labels"].flatten(), reduction="sum"), mb["labels"].numel()


def in_stages(world, name: str, plan: dict[str, Any]) -> list[float]:
    options: dict[str, Any] = {"global_batch": ROWS, "microbatch": 2, "world": world}
    running = Engine(partial(whole, name), of_logits, SGD, Plan(**plan), **options)
    results = [running.step(batch) for batch in running.batches(images() if name == "vit" else data(), steps=STEPS)]
    found = [number for each in results for number in (each.loss, each.grad_norm)]
    running.close()
    return found


@pytest.mark.parametrize("name", CUT)
def test_a_model_of_others_in_stages_equals_one_process(name):
    one = run_ranks(in_stages, 1, name, {})[0]
    for found in run_ranks(in_stages, 2, name, {"pp": 2}):
        assert found == pytest.approx(one, rel=2e-5)
