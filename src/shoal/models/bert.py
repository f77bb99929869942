"""BERT: a bidirectional encoder with a masked-language-model head (Devlin et al. 2018,
https://arxiv.org/abs/1810.04805).

There are no segment embeddings and no next-sentence task (dropped as in RoBERTa, Liu et al. 2019).

Shape suffixes: B batch, T sequence, D d_model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.attention import Attention, document_mask
from shoal.models.checks import divides, fraction, positive, short_enough
from shoal.models.losses import IGNORED


@dataclass(frozen=True)
class BertConfig:
    """The size of a BERT; the defaults are BERT-base. The last id of the vocabulary is the mask token.

    pre_norm: moves the norms before the branches (and adds one at the end), which trains without warm-up; published
        BERT is post-norm.
    """

    vocab_size: int
    sequence: int = 512
    layers: int = 12
    d_model: int = 768
    heads: int = 12
    d_ff: int | None = None
    pre_norm: bool = False
    dropout: float = 0.1
    norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        for field in ("vocab_size", "sequence", "layers", "d_model", "heads", "ff"):
            positive("Bert", field, getattr(self, field))
        fraction("Bert", "dropout", self.dropout)
        divides("Bert", "heads", self.heads, "d_model", self.d_model)

    @property
    def ff(self) -> int:
        return 4 * self.d_model if self.d_ff is None else self.d_ff


class Layer(nn.Module):
    """Attention and MLP as residual branches; norms after the sums (post-norm) or before the branches (pre-norm)."""

    def __init__(self, cfg: BertConfig) -> None:
        super().__init__()
        self.pre_norm = cfg.pre_norm
        self.attention = Attention(cfg.d_model, cfg.heads, cfg.heads, bias=True, causal=False, dropout=cfg.dropout)
        self.attention_dropout = nn.Dropout(cfg.dropout)
        self.attention_norm = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)
        self.up = nn.Linear(cfg.d_model, cfg.ff)
        self.down = nn.Linear(cfg.ff, cfg.d_model)
        self.mlp_dropout = nn.Dropout(cfg.dropout)
        self.mlp_norm = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)

    def _mlp(self, x_BTD: Tensor) -> Tensor:
        return self.mlp_dropout(self.down(F.gelu(self.up(x_BTD))))

    def forward(self, x_BTD: Tensor, mask_B1TT: Tensor | None = None) -> Tensor:
        if self.pre_norm:
            x_BTD = x_BTD + self.attention_dropout(self.attention(self.attention_norm(x_BTD), mask_B1TT=mask_B1TT))
            return x_BTD + self._mlp(self.mlp_norm(x_BTD))
        x_BTD = self.attention_norm(x_BTD + self.attention_dropout(self.attention(x_BTD, mask_B1TT=mask_B1TT)))
        return self.mlp_norm(x_BTD + self._mlp(x_BTD))


class MaskedHead(nn.Module):
    """The head: a transform, then the decoder, whose weight is the token embedding."""

    def __init__(self, cfg: BertConfig) -> None:
        super().__init__()
        self.transform = nn.Linear(cfg.d_model, cfg.d_model)
        self.norm = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)
        self.decoder = nn.Linear(cfg.d_model, cfg.vocab_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.decoder(self.norm(F.gelu(self.transform(x_BTD))))


class Bert(nn.Module):
    """A model from token ids to the logits of the token at each position."""

    def __init__(self, cfg: BertConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.token_embedding = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.position_embedding = nn.Embedding(cfg.sequence, cfg.d_model)
        self.embedding_norm = nn.Identity() if cfg.pre_norm else nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)
        self.embedding_dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Layer(cfg) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps) if cfg.pre_norm else nn.Identity()
        self.head = MaskedHead(cfg)
        self.head.decoder.weight = self.token_embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises as BERT: normal(0, 0.02) everywhere, biases 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(
        self, input_ids_BT: Tensor, position_ids: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """Returns logits [B, T, V]. With `document_ids` [B, T] a token sees only its own document."""
        T = input_ids_BT.shape[1]
        short_enough("Bert", T, self.cfg.sequence)
        if position_ids is None:
            position_ids = torch.arange(T, device=input_ids_BT.device)[None]
        mask_B1TT = None if document_ids is None else document_mask(document_ids, causal=False)
        x_BTD = self.token_embedding(input_ids_BT) + self.position_embedding(position_ids)
        x_BTD = self.embedding_dropout(self.embedding_norm(x_BTD))
        for block in self.blocks:
            x_BTD = block(x_BTD, mask_B1TT)
        return self.head(self.norm(x_BTD))


class Rows(Protocol):
    """A map-style dataset of `input_ids` [T]."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, Tensor]: ...


class MaskedTokens:
    """A masked-language-model dataset over rows of text: hides 15% of each row's tokens.

    Of the chosen positions 80% show `mask_id`, 10% a random token, 10% the token itself (BERT, appendix A.1). `labels`
    are the hidden tokens there and -100 elsewhere. Positions with the label -100 (padding) are not chosen. The choice
    is a function of (seed, index) alone, so it is the same on every rank and in every epoch.
    """

    def __init__(self, rows: Rows, vocab_size: int, mask_id: int, rate: float = 0.15, seed: int = 0) -> None:
        fraction("MaskedTokens", "rate", rate)
        self.rows, self.vocab_size, self.mask_id, self.rate, self.seed = rows, vocab_size, mask_id, rate, seed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        ids_T = row["input_ids"]
        # A generator needs one number: a large odd stride keeps the streams of two seeds apart for fewer rows than
        # that.
        generator = torch.Generator().manual_seed(self.seed * 0x9E3779B1 + index)
        chosen_T = torch.rand(ids_T.shape, generator=generator) < self.rate
        if "labels" in row:
            chosen_T &= row["labels"] != IGNORED
        fate_T = torch.rand(ids_T.shape, generator=generator)
        random_T = torch.randint(0, self.vocab_size, ids_T.shape, generator=generator)
        shown_T = torch.where(fate_T < 0.8, self.mask_id, torch.where(fate_T < 0.9, random_T, ids_T))
        return {
            **row,
            "input_ids": torch.where(chosen_T, shown_T, ids_T),
            "labels": torch.where(chosen_T, ids_T, IGNORED),
        }
