"""Stages of models of `transformers` that collect hidden states, attention and router logits of their layers by
hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
)

from shoal.comm.simulation import simulate_world
from tests.pipeline.running import losses_of

IMAGE = 1
"""The id in whose places the four patches of an image come."""
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def llava() -> nn.Module:
    vision = CLIPVisionConfig(**SIZES, image_size=16, patch_size=8, projection_dim=16)
    text = LlamaConfig(**SIZES, vocab_size=32, num_key_value_heads=2, max_position_embeddings=16)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, vision_feature_layer=-2)
    )


def next_token(model: nn.Module, mb: Any) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=mb["ids"], pixel_values=mb["image"]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), mb["ids"][:, 1:].flatten(), reduction="sum"), torch.tensor(
        logits[..., 0].numel()
    )


def losses(world: Any, plan: dict[str, Any]) -> list[float]:
    draw = torch.Generator().manual_seed(0)
    rows = [
        {
            "ids": torch.cat([torch.full((4,), IMAGE), torch.randint(2, 32, (4,), generator=draw)]),
            "image": torch.randn(3, 16, 16, generator=draw),
        }
        for _ in range(8)
    ]
    return losses_of(world, llava, next_token, rows, plan, 4)


TOWER, TEXT = "model.vision_tower", "model.language_model"
FIRST = [f"{TEXT}.embed_tokens", f"{TOWER}.embeddings", f"{TOWER}.pre_layrnorm", f"{TOWER}.encoder.layers.0"]
TOWERS_REST = [f"{TOWER}.encoder.layers.1", f"{TOWER}.post_layernorm", "model.multi_modal_projector"]
INSIDE = [FIRST, [*TOWERS_REST, f"{TEXT}.layers", f"{TEXT}.norm", "lm_head"]]
"""A cut between the layers of the tower, of which the first one's result is picked."""


@pytest.mark.parametrize("stages", [None, INSIDE], ids=["behind", "inside"])
def test_a_layer_may_be_picked_from_the_hidden_states_of_a_tower_that_is_cut(stages: Any) -> None:
    (alone,) = simulate_world(1, losses, {})
    for found in simulate_world(2, losses, {"pp": 2, "stages": stages}):
        assert found == pytest.approx(alone, rel=1e-5)


def mixtral() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    return MixtralForCausalLM(
        MixtralConfig(**SIZES, **experts, vocab_size=32, max_position_embeddings=16, attn_implementation="eager")
    )


def with_all(model: nn.Module, mb: Any) -> tuple[Tensor, Tensor]:
    """Asks for what its config does not, and computes with what all layers give."""
    made = model(mb["ids"], output_router_logits=True, output_attentions=True, output_hidden_states=True)
    total = F.cross_entropy(made.logits[:, :-1].flatten(0, 1), mb["ids"][:, 1:].flatten(), reduction="sum")
    beside = [each.square().sum() for each in (*made.attentions, *made.hidden_states)]
    return total + made.aux_loss + torch.stack(beside).sum(), torch.tensor(mb["ids"].numel())


def losses_with_all(world: Any, plan: dict[str, Any]) -> list[float]:
    draw = torch.Generator().manual_seed(0)
    rows = [{"ids": torch.randint(2, 32, (6,), generator=draw)} for _ in range(8)]
    return losses_of(world, mixtral, with_all, rows, plan, 4)


def test_what_a_loss_asks_for_by_a_flag_comes_of_the_layers_of_all_stages() -> None:
    """There was nothing of attention, and no logits of routers, of which a loss then found nothing to add up."""
    (alone,) = simulate_world(1, losses_with_all, {})
    for found in simulate_world(2, losses_with_all, {"pp": 2}):
        assert found == pytest.approx(alone, rel=1e-5)
