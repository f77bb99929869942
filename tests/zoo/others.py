"""What else people train: torch's own transformer, recurrent translation, a recommender."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.entry import LENGTH, SAMPLES, VOCABULARY, Microbatch, Model, Sample, cross_entropy, draws, rows


class Translator(nn.Module):
    """`nn.Transformer` between two embeddings."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.body = nn.Transformer(width, 4, 2, 2, 48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.places.dtype)
        h = self.body(self.source(source) + self.places, self.target(target) + self.places, tgt_mask=mask)
        return self.head(h)


class Recurrent(nn.Module):
    """An LSTM that reads, one that writes, and attention between them."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.LSTM(width, width, 2, batch_first=True)
        self.decoder = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(2 * width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        read, state = self.encoder(self.words(source))
        written, _ = self.decoder(self.words(target), state)
        looked = torch.softmax(written @ read.transpose(1, 2), -1) @ read
        return self.head(torch.cat([written, looked], -1))


class Recommender(nn.Module):
    """DLRM: embeddings of categories and a net of numbers meet in products of pairs."""

    def __init__(self, tables: tuple[int, ...] = (50, 30, 20), width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for rows in tables)
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, width))
        pairs = (len(tables) + 1) * len(tables) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        looked_up = [table(categories[:, place]) for place, table in enumerate(self.tables)]
        features = torch.stack([dense, *looked_up], 1)
        products = features @ features.transpose(1, 2)
        one, other = torch.tril_indices(features.shape[1], features.shape[1], -1)
        return self.top(torch.cat([dense, products[:, one, other]], 1)).squeeze(1)


def clicks() -> list[Sample]:
    draw = draws(4)
    return [
        {
            "numbers": torch.randn(4, generator=draw),
            "categories": torch.randint(20, (3, 2), generator=draw),
            "clicked": torch.randint(2, (), generator=draw),
        }
        for _ in range(SAMPLES)
    ]


def click(model: nn.Module, mb: Microbatch) -> tuple[Tensor, int]:
    logits = model(mb["numbers"], mb["categories"])
    return F.binary_cross_entropy_with_logits(logits, mb["clicked"].to(logits.dtype), reduction="sum"), len(logits)


def turned_round(model: nn.Module, mb: Microbatch) -> tuple[Tensor, Tensor]:
    return cross_entropy(model(mb["input_ids"], mb["input_ids"].flip(1)), mb["labels"])


OTHERS: dict[str, Model] = {
    "nn.Transformer": Model(Translator, turned_round, rows),
    "lstm seq2seq": Model(Recurrent, turned_round, rows),
    "recommender": Model(Recommender, click, clicks),
}
