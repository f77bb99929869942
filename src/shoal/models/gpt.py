"""GPT: a pre-norm decoder, from GPT-2 (learned positions, GELU, LayerNorm) to Llama (rotary, SwiGLU, RMSNorm).

Shape suffixes: B batch, T sequence, D d_model, F width of the MLP, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ArgumentError
from shoal.models.attention import Attention, Rotation, document_mask, rotation
from shoal.models.checks import divides, fraction, one_of, positive, short_enough
from shoal.models.experts import Experts
from shoal.models.moe import MoE, MoEConfig, Router, WithLosses


@dataclass(frozen=True)
class GPTConfig:
    """The size and the kind of a GPT.

    sequence: the longest row that the model takes.
    kv_heads: key/value heads; default `heads`.
    d_ff: width of the MLP; default 4 d_model (GELU), or 8/3 d_model rounded up to a multiple of 64 (SwiGLU: three
        matrices with the weights of two).
    tied: the head shares the embedding's weight.
    bias: of linear layers and LayerNorms; the head and experts have none.
    dropout: acts on embeddings, attention and residual branches.
    moe: blocks have a mixture of experts in place of the MLP.
    """

    vocab_size: int
    sequence: int
    layers: int
    d_model: int
    heads: int
    kv_heads: int | None = None
    positions: Literal["learned", "rotary"] = "learned"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    d_ff: int | None = None
    tied: bool = True
    bias: bool = True
    dropout: float = 0.0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        for field in ("vocab_size", "sequence", "layers", "d_model", "heads", "rope_theta", "norm_eps"):
            positive("GPT", field, getattr(self, field))
        positive("GPT", "kv_heads", self.key_value_heads)
        positive("GPT", "d_ff", self.ff)
        one_of("GPT", "positions", self.positions, ("learned", "rotary"))
        one_of("GPT", "mlp", self.mlp, ("gelu", "swiglu"))
        one_of("GPT", "norm", self.norm, ("layernorm", "rmsnorm"))
        fraction("GPT", "dropout", self.dropout)
        divides("GPT", "heads", self.heads, "d_model", self.d_model)
        divides("GPT", "kv_heads", self.key_value_heads, "heads", self.heads)
        if self.moe is not None and self.moe.every > self.layers:
            raise ArgumentError(
                "moe.every",
                f" = {self.moe.every} of GPT: of {self.layers} layers none is every {self.moe.every}th; give at most "
                "layers.",
            )
        if self.positions != "rotary" and self.rope_theta != GPTConfig.rope_theta:
            raise ArgumentError(
                "rope_theta",
                f' = {self.rope_theta} of GPT is of rotary positions: give positions = "rotary" too, or leave it out.',
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise ArgumentError(
                "heads",
                f" = {self.heads} of GPT cut d_model = {self.d_model} into heads of {self.head_size} channels; rotary "
                "positions turn pairs of channels, so choose an even head size.",
            )

    @property
    def key_value_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        return self.d_model // self.heads

    @property
    def ff(self) -> int:
        if self.d_ff is not None:
            return self.d_ff
        return 4 * self.d_model if self.mlp == "gelu" else 64 * math.ceil(8 * self.d_model / 3 / 64)

    def has_experts(self, block: int) -> bool:
        """Returns whether that block has a mixture of experts: each `moe.every`-th one."""
        return self.moe is not None and block % self.moe.every == self.moe.every - 1


class GeluMLP(nn.Module):
    """The MLP down(gelu(up(x))) with the tanh form of GELU, as in GPT-2."""

    def __init__(self, d_model: int, d_ff: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD), approximate="tanh"))


class SwiGLU(nn.Module):
    """The MLP down(silu(gate(x)) * up(x)) (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, d_model: int, d_ff: int, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=bias)
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


def _norm(cfg: GPTConfig) -> nn.Module:
    if cfg.norm == "rmsnorm":
        return nn.RMSNorm(cfg.d_model, eps=cfg.norm_eps)
    return nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps, bias=cfg.bias)


def _sum(x_BTD: Tensor, branch_BTD: Tensor) -> Tensor:
    """Returns x + branch, computed in place in the branch, which no backward needs. That saves a short-lived tensor,
    whose hole the C heap would not fill again. It is a new tensor under autocast, where the branch is narrower than x,
    and where a dispatch mode may have saved the branch (selective recompute does)."""
    watched = not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0
    return x_BTD + branch_BTD if watched or branch_BTD.dtype != x_BTD.dtype else branch_BTD.add_(x_BTD)


def _mlp(cfg: GPTConfig, d_ff: int) -> GeluMLP | SwiGLU:
    return (GeluMLP if cfg.mlp == "gelu" else SwiGLU)(cfg.d_model, d_ff, cfg.bias)


class Block(nn.Module):
    """A block: x + attention(norm(x)), then x + mlp(norm(x)). With experts it also returns its router's losses [2]."""

    def __init__(self, cfg: GPTConfig, has_experts: bool = False) -> None:
        super().__init__()
        self.attention_norm = _norm(cfg)
        self.attention = Attention(
            cfg.d_model, cfg.heads, cfg.key_value_heads, bias=cfg.bias, causal=True, dropout=cfg.dropout
        )
        self.attention_dropout = nn.Dropout(cfg.dropout)
        self.mlp_norm = _norm(cfg)
        if has_experts and cfg.moe is not None:
            width = cfg.moe.d_ff or cfg.ff
            self.mlp: nn.Module = MoE(cfg.moe, cfg.d_model, width, cfg.mlp, lambda experts: _mlp(cfg, experts * width))
        else:
            self.mlp = _mlp(cfg, cfg.ff)
        self.mlp_dropout = nn.Dropout(cfg.dropout)

    def forward(self, x_BTD: Tensor, by: Rotation | None = None, mask_B1TT: Tensor | None = None) -> Any:
        x_BTD = _sum(x_BTD, self.attention_dropout(self.attention(self.attention_norm(x_BTD), by, mask_B1TT)))
        y_BTD = self.mlp(self.mlp_norm(x_BTD))
        if isinstance(y_BTD, Tensor):
            return _sum(x_BTD, self.mlp_dropout(y_BTD))
        y_BTD, losses = y_BTD
        return x_BTD + self.mlp_dropout(y_BTD), losses


class GPT(nn.Module):
    """A model from token ids to next-token logits, written for one device."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.token_embedding = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.position_embedding = nn.Embedding(cfg.sequence, cfg.d_model) if cfg.positions == "learned" else None
        self.embedding_dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg, cfg.has_experts(place)) for place in range(cfg.layers))
        self.norm = _norm(cfg)
        self.head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        if cfg.tied:
            self.head.weight = self.token_embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises as GPT-2: normal(0, 0.02), biases 0. The 2 x layers matrices that write to the residual stream
        are scaled by 1 / sqrt(2 x layers), so that its variance does not grow with depth (Radford et al. 2019, section
        2.3)."""
        residual = {id(m.out) for m in self.modules() if isinstance(m, Attention)}
        residual |= {id(m.down) for m in self.modules() if isinstance(m, GeluMLP | SwiGLU)}
        deep = math.sqrt(2 * self.cfg.layers)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | Router):
                nn.init.normal_(module.weight, std=0.02 / (deep if id(module) in residual else 1.0))
            if isinstance(module, Experts):
                for name, weight in module.named_parameters():
                    nn.init.normal_(weight, std=0.02 / (deep if name == "down_proj" else 1.0))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self, input_ids_BT: Tensor, position_ids: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Any:
        """Returns logits [B, T, V]; with experts `WithLosses`, whose losses are means over the blocks with experts.

        `position_ids` [B, T] default to 0..T-1. With `document_ids` [B, T] a token sees only its own document. Raises
        `UserError` for a row longer than `cfg.sequence`.
        """
        T = input_ids_BT.shape[1]
        short_enough("GPT", T, self.cfg.sequence)
        if position_ids is None:
            position_ids = torch.arange(T, device=input_ids_BT.device)[None]
        x_BTD = self.token_embedding(input_ids_BT)
        by = None
        if self.position_embedding is not None:
            x_BTD = x_BTD + self.position_embedding(position_ids)
        else:
            by = rotation(position_ids, self.cfg.head_size, self.cfg.rope_theta, x_BTD.dtype)
        mask_B1TT = None if document_ids is None else document_mask(document_ids, causal=True)

        x_BTD = self.embedding_dropout(x_BTD)
        losses = []
        for block in self.blocks:
            x_BTD = block(x_BTD, by, mask_B1TT)
            if not isinstance(x_BTD, Tensor):
                x_BTD, routers = x_BTD
                losses.append(routers)
        logits = self.head(self.norm(x_BTD))
        if self.cfg.moe is None:
            return logits
        balance, z = torch.stack(losses).mean(0) if losses else x_BTD.new_zeros(2)
        means = {"router": balance, "router_z": z}
        return WithLosses(logits, {name: factor * means[name] for name, factor in self.cfg.moe.losses.items()})
