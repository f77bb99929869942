"""A recurrent language model: embedding, stacked LSTMs, head (Zaremba et al. 2014, https://arxiv.org/abs/1409.2329).

Shape suffixes: B batch, T sequence, E embedding, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from shoal.errors import ArgumentError
from shoal.models.checks import fraction, positive


@dataclass(frozen=True)
class LSTMConfig:
    """The size of an LSTM. `tied` shares the embedding with the head and needs `embedding == hidden`."""

    vocab_size: int
    embedding: int = 256
    hidden: int = 256
    layers: int = 2
    dropout: float = 0.0
    tied: bool = False

    def __post_init__(self) -> None:
        for field in ("vocab_size", "embedding", "hidden", "layers"):
            positive("LSTM", field, getattr(self, field))
        fraction("LSTM", "dropout", self.dropout)
        if self.tied and self.embedding != self.hidden:
            raise ArgumentError("tied", f" of LSTM needs embedding = {self.embedding} equal to hidden = {self.hidden}.")


class LSTM(nn.Module):
    """A model from token ids [B, T] to next-token logits [B, T, V]; a row starts from a zero state.

    Each layer is an `nn.LSTM` of its own after an `nn.Dropout`, so that the model can be cut between layers, and the
    dropout can be keyed by name.
    """

    def __init__(self, cfg: LSTMConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.token_embedding = nn.Embedding(cfg.vocab_size, cfg.embedding)
        widths = [cfg.embedding] + [cfg.hidden] * (cfg.layers - 1)
        self.blocks = nn.ModuleList(nn.LSTM(width, cfg.hidden, batch_first=True) for width in widths)
        self.dropouts = nn.ModuleList(nn.Dropout(cfg.dropout) for _ in range(cfg.layers + 1))
        self.head = nn.Linear(cfg.hidden, cfg.vocab_size)
        if cfg.tied:
            self.head.weight = self.token_embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises embedding and head uniform(-0.1, 0.1), as Zaremba et al.; the LSTMs keep torch's own."""
        nn.init.uniform_(self.token_embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.head.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids_BT: Tensor) -> Tensor:
        x_BTH = self.dropouts[0](self.token_embedding(input_ids_BT))
        for block, dropout in zip(self.blocks, self.dropouts[1:], strict=True):
            x_BTH = dropout(block(x_BTH)[0])
        return self.head(x_BTH)
