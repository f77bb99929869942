"""Measures a run beside its training loss: the validation loss, accuracy, and a text that the model writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data import Tokenizer
from shoal.engine import Engine
from shoal.models import classification
from shoal.models.losses import IGNORED, Loss

NEW_TOKENS, TEMPERATURE, TOP_K = 160, 0.8, 40


class Subsample:
    """At most `samples` items of a map-style dataset (all for 0), evenly spaced, as the first items are often alike."""

    def __init__(self, dataset: Any, samples: int) -> None:
        self._dataset = dataset
        self._samples = min(samples or len(dataset), len(dataset))

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._dataset[index * len(self._dataset) // self._samples]


def measure_of(loss: Loss) -> Loss | None:
    """Returns the measure that an evaluation shows beside `loss`: the accuracy of a classifier, or None."""
    return _right if loss is classification else None


def _right(model: nn.Module, mb: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    counts = mb["labels"] != IGNORED
    return ((model(mb["inputs"]).argmax(dim=-1) == mb["labels"]) & counts).sum().float(), counts.sum()


def write_on(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int = NEW_TOKENS,
    temperature: float = TEMPERATURE,
    top_k: int | None = TOP_K,
    seed: int | None = None,
) -> str:
    """Returns the model's continuation of `prompt`, up to the end of the document. A collective call.

    tokens: the largest number of new tokens.
    temperature, top_k, seed: of the sampling, as in `Engine.generate`; the same seed gives the same text.
    """
    ids = torch.tensor([tokenizer.encode(prompt) or [tokenizer.eos]])
    written = engine.generate(ids, tokens, temperature=temperature, top_k=top_k, seed=seed)[0, ids.shape[1] :].tolist()
    if tokenizer.eos in written:
        written = written[: written.index(tokenizer.eos)]
    known = [token for token in written if token < tokenizer.vocab_size]  # a model may have more ids than its tokenizer
    return tokenizer.decode(known)
