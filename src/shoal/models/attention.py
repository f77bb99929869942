"""Self-attention shared by the GPT and BERT models: grouped-query heads, rotary positions, document masks.

Shape suffixes: B batch, T sequence, D d_model, H query heads, G key/value heads, K head size (D / H).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rotation = tuple[Tensor, Tensor]


def rotation(position_ids_BT: Tensor, head_size: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Returns cos and sin, each [B, 1, T, K], of the rotary angles (Su et al. 2021, https://arxiv.org/abs/2104.09864).

    Angles are computed in fp32 and cast last, as in `transformers`. They are a function of the positions, not a buffer,
    so a model built on the meta device has nothing to recompute.
    """
    channels = torch.arange(0, head_size, 2, device=position_ids_BT.device, dtype=torch.float32)
    frequencies = 1.0 / theta ** (channels / head_size)
    angles_BTK = (position_ids_BT[..., None].float() * frequencies).repeat(1, 1, 2)
    return angles_BTK.cos()[:, None].to(dtype), angles_BTK.sin()[:, None].to(dtype)


def rotate(x_BHTK: Tensor, by: Rotation) -> Tensor:
    """Rotates channel i with channel i + K/2, as `transformers` does, so that its weights need no permutation."""
    cos, sin = by
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos + torch.cat((-second, first), dim=-1) * sin


def document_mask(document_ids_BT: Tensor, causal: bool) -> Tensor:
    """Returns a mask [B, 1, T, T], true where a query (row) sees a key: same document, and not later if `causal`."""
    mask = document_ids_BT[:, None, :, None] == document_ids_BT[:, None, None, :]
    return mask.tril() if causal else mask


class Attention(nn.Module):
    """Multi-head self-attention with G <= H key/value heads through `F.scaled_dot_product_attention`.

    `qkv` is one matrix whose rows are [H queries; G keys; G values], a head's K rows together.
    """

    def __init__(self, d_model: int, heads: int, kv_heads: int, *, bias: bool, causal: bool, dropout: float) -> None:
        super().__init__()
        self.head_size = d_model // heads
        self.heads, self.kv_heads = heads, kv_heads
        self.causal, self.dropout = causal, dropout
        self.qkv = nn.Linear(d_model, (heads + 2 * kv_heads) * self.head_size, bias=bias)
        self.out = nn.Linear(d_model, d_model, bias=bias)

    def forward(self, x_BTD: Tensor, by: Rotation | None = None, mask_B1TT: Tensor | None = None) -> Tensor:
        """Returns [B, T, D]. A mask replaces the causal mask, so it has to be causal itself where needed."""
        heads_BTHK = self.qkv(x_BTD).unflatten(-1, (-1, self.head_size))
        q, k, v = (x.transpose(1, 2) for x in heads_BTHK.split((self.heads, self.kv_heads, self.kv_heads), dim=2))
        if by is not None:
            q, k = rotate(q, by), rotate(k, by)
        y_BHTK = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask_B1TT,
            is_causal=self.causal and mask_B1TT is None,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.kv_heads != self.heads,
        )
        return self.out(y_BHTK.transpose(1, 2).flatten(2))
