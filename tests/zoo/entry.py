"""One model of the zoo: how its user would build it, feed it and take its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES, VOCABULARY, LENGTH, CLASSES = 20, 61, 10, 5
Sample = dict[str, Tensor]
Microbatch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Model:
    """`dtype` "fp32": the model has kernels that take at most that (products by groups of experts)."""

    factory: Callable[[], nn.Module]
    loss: Callable[..., Any]
    samples: Callable[[], list[Sample]]
    dtype: str = "fp64"


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over the labels that are not -100, and how many they are. `logits` [..., classes], `labels` [...]."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum"), (labels != -100).sum()


def rows() -> list[Sample]:
    """Token rows, a quarter of the labels ignored, unevenly."""
    draw = draws()
    ids = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH + 1), generator=draw)
    ignored = torch.rand(SAMPLES, LENGTH, generator=draw) < torch.rand(SAMPLES, 1, generator=draw) * 0.5
    return [
        {"input_ids": row[:-1], "labels": row[1:].masked_fill(mask, -100)}
        for row, mask in zip(ids, ignored, strict=True)
    ]


def images(size: int = 32) -> list[Sample]:
    draw = draws(1)
    return [
        {
            "pixel_values": torch.randn(3, size, size, generator=draw),
            "labels": torch.randint(CLASSES, (), generator=draw),
        }
        for _ in range(SAMPLES)
    ]


def next_token(model: nn.Module, mb: Microbatch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each next token; labels come shifted."""
    return cross_entropy(model(input_ids=mb["input_ids"]).logits, mb["labels"])


def classes(model: nn.Module, mb: Microbatch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of a classifier that returns logits, or an object that has them."""
    result = model(mb["pixel_values"])
    return cross_entropy(getattr(result, "logits", result), mb["labels"])
