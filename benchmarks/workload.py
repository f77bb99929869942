"""What every contender of `dp` and `memory` trains: the model, the cases, the tokens, the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shoal.models.gpt import GPT
from shoal.models.presets import PRESETS

MODEL = PRESETS["33m"]
"""What `build_model` builds; a benchmark that asks for another one sets it in each process."""
LEARNING_RATE = 3e-4
SAMPLES = 64
"""Rows of tokens that the steps go round; enough that no batch repeats within a turn of the small case."""


@dataclass(frozen=True)
class Case:
    """One shape of the work. `batch` is the global batch in rows of `sequence` tokens."""

    name: str
    sequence: int
    batch: int
    steps: int
    """Timed steps a turn, so that a turn takes a few seconds."""


CASES = {
    "compute": Case("compute", sequence=256, batch=8, steps=3),
    "communication": Case("communication", sequence=64, batch=2, steps=12),
}


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """SAMPLES rows of random tokens, the same on every rank; labels are the tokens shifted by one."""

    def __init__(self, sequence: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, MODEL.vocab_size, (SAMPLES, sequence + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index, :-1], "labels": self.rows[index, 1:]}

    def shares(self, batch: int, rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
        """The (input_ids, labels) of this rank, one pair a step of the epoch; each has batch / size rows."""
        share = batch // size
        starts = range(rank * share, len(self.rows) - batch + 1 + rank * share, batch)
        return [
            (self.rows[at : at + share, :-1].contiguous(), self.rows[at : at + share, 1:].contiguous()) for at in starts
        ]


def build_model() -> GPT:
    """The GPT of 33.7M parameters, the same weights on every rank and for every contender."""
    torch.manual_seed(0)
    return GPT(MODEL)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, mean over the tokens, in fp32 as everybody trains."""
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def sum_loss(model: torch.nn.Module, microbatch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The same loss in the form that Shoal takes: the sum over the tokens and their count."""
    labels = microbatch["labels"]
    logits = model(microbatch["input_ids"]).float()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()
