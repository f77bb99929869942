"""What a run looks at beside its loss: the validation loss, and a text that the model writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data import Tokenizer
from shoal.engine import Engine
from shoal.models import causal_lm, classification
from shoal.models.losses import IGNORED, Loss

NEW_TOKENS, TEMPERATURE, TOP_K = 160, 0.8, 40


class Spread:
    """At most `samples` items of a map-style dataset (0 for all), evenly spread over it: the first ones are often of one kind."""

    def __init__(self, dataset: Any, samples: int) -> None:
        self._dataset = dataset
        self._samples = min(samples or len(dataset), len(dataset))

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._dataset[index * len(self._dataset) // self._samples]


def measure_of(loss: Loss) -> Loss | None:
    """What an evaluation with this loss shows beside it: the share of samples whose class is right."""
    return _right if loss is classification else None


def _right(model: nn.Module, mb: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    counts = mb["labels"] != IGNORED
    return ((model(mb["inputs"]).argmax(dim=-1) == mb["labels"]) & counts).sum().float(), counts.sum()


def can_write(loss: Loss) -> bool:
    """Whether a model with this loss predicts the next token, so that it can go on with a text."""
    return loss is causal_lm


def write_on(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int = NEW_TOKENS,
    temperature: float = TEMPERATURE,
    top_k: int | None = TOP_K,
    seed: int | None = None,
) -> str:
    """What the model writes after `prompt`, up to the document's end or so many `tokens`; the same draw each time. All ranks call it."""
    ids = torch.tensor([tokenizer.encode(prompt) or [tokenizer.eos]])
    written = engine.generate(ids, tokens, temperature=temperature, top_k=top_k, seed=seed)[0, ids.shape[1] :].tolist()
    if tokenizer.eos in written:
        written = written[: written.index(tokenizer.eos)]
    known = [token for token in written if token < tokenizer.vocab_size]  # a model may have more ids than its tokenizer
    return tokenizer.decode(known)
