"""Samples from a language model with one full forward per token, without a cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from shoal.errors import UserError


def context_length(model: nn.Module) -> int | None:
    """Returns the longest row that `model` takes, from its `cfg` (Shoal) or `config` (transformers); None: no limit."""
    longest = getattr(getattr(model, "cfg", None), "sequence", None)
    return longest if longest is not None else getattr(getattr(model, "config", None), "max_position_embeddings", None)


@torch.no_grad()
def generate(
    model: nn.Module,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns `ids` [B, T] continued to [B, T + max_new_tokens].

    model: returns logits [B, T, V] or an object with `.logits`; runs in evaluation mode. It sees only the last
        `context_length(model)` tokens.
    temperature: 0 takes the likeliest token.
    top_k: samples among the k likeliest tokens.

    Raises `UserError` for an empty prompt, a temperature below 0 and a k below 1.
    """
    if not 0 <= temperature < math.inf:
        raise UserError(f"generate: temperature = {temperature}: give a number from 0 up, where 0 takes the likeliest")
    if top_k is not None and top_k < 1:
        raise UserError(f"generate: top_k = {top_k}: give at least 1, or None to draw among all tokens")
    if ids.shape[1] == 0:
        raise UserError("generate: the prompt has no token; give at least one, e.g. the end-of-text token.")
    longest = context_length(model) or ids.shape[1] + max_new_tokens
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            output = model(ids[:, -longest:])
            logits_BV = getattr(output, "logits", output)[:, -1].float()
            ids = torch.cat((ids, _draw(logits_BV, temperature, top_k, generator)), dim=1)
    finally:
        model.train(was_training)
    return ids


def _draw(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Samples one token for each row: [B, 1]."""
    if temperature < torch.finfo(logits_BV.dtype).tiny:
        return logits_BV.argmax(dim=-1, keepdim=True)
    logits_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / temperature  # none overflows, however cold
    if top_k is not None:
        kth = logits_BV.topk(min(top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth, -torch.inf)
    return torch.multinomial(logits_BV.softmax(dim=-1), 1, generator=generator)
