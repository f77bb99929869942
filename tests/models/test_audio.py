"""Models of speech of `transformers`, whose forwards draw from torch's and numpy's generators (LayerDrop, SpecAugment):
each plan against one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Engine, Plan
from tests.pool import reference, run_ranks

pytest.importorskip("transformers")

ROWS, SAMPLES, CLASSES = 8, 400, 5


def model(masks: bool = True) -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    settings = Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        num_labels=CLASSES,
        layerdrop=0.3,
        apply_spec_augment=masks,
        mask_time_prob=0.5,
        mask_time_length=4,
        mask_feature_prob=0.3,
        mask_feature_length=2,
    )
    return Wav2Vec2ForSequenceClassification(settings)


def data() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    labels = torch.randint(CLASSES, (ROWS,), generator=draw)
    return [{"input_values": torch.randn(SAMPLES, generator=draw), "labels": label} for label in labels]


def loss(module: nn.Module, mb: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = module(input_values=mb["input_values"]).logits
    return F.cross_entropy(logits.float(), mb["labels"], reduction="sum"), len(mb["labels"])


def trained(world: Any, plan: dict[str, Any], masks: bool = True) -> list[float]:
    sgd = partial(torch.optim.SGD, lr=0.05)
    running = Engine(partial(model, masks), loss, sgd, Plan(**plan), global_batch=4, microbatch=2, world=world)
    try:
        results = [running.step(batch) for batch in running.batches(data(), steps=4)]
        return [number for each in results for number in (each.loss, each.grad_norm)]
    finally:
        running.close()


@pytest.mark.parametrize("plan", [{"dp": 2}, {"tp": 2}, {"tp": 2, "recompute": "full"}], ids=str)
def test_masks_and_dropped_layers_are_those_of_one_process(plan):
    whole = reference(trained, 1, {})[0]
    assert whole != reference(trained, 1, {}, False)[0], "masks change what is computed"
    for found in run_ranks(trained, 2, plan):
        assert found == pytest.approx(whole, rel=2e-4)


def test_a_second_forward_finds_the_masks_of_the_first():
    whole = reference(trained, 1, {})[0]
    assert run_ranks(trained, 1, {"recompute": "full"})[0] == pytest.approx(whole, rel=1e-5)
