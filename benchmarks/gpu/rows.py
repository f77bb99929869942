"""Random tokens for the GPU's benchmarks, the same on every machine."""

from __future__ import annotations

import torch

from shoal.models import GPTConfig


def rows(vocabulary: int, sequence: int, number: int) -> list[dict[str, torch.Tensor]]:
    """Samples; a fifth of the labels ignored."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (number, sequence + 1), generator=draw)
    labels = tokens[:, 1:].masked_fill(torch.rand(number, sequence, generator=draw) < 0.2, -100)
    return [{"input_ids": row[:-1], "labels": label} for row, label in zip(tokens, labels, strict=True)]


def stacked(config: GPTConfig, batch: int, pinned: bool = False) -> dict[str, torch.Tensor]:
    """One batch of them; in pinned memory, as a loader of torch has it for a GPU."""
    samples = rows(config.vocab_size, config.sequence, batch)
    whole = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    return {key: value.pin_memory() for key, value in whole.items()} if pinned else whole
