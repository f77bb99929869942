"""`nn.MultiheadAttention` with some of its heads: torch's own computes with whole weights alone."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.parallel.tensor.layers import Cut
from shoal.parallel.tensor.piece import Piece


class Multihead(Cut):
    """The attention of this rank's heads; all ranks have the same queries, keys and values, and the same result."""

    embed_dim: int
    num_heads: int
    head_dim: int
    batch_first: bool
    dropout: float
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    out_proj: nn.Linear

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns what `nn.MultiheadAttention.forward` does, for the same arguments."""
        alone = query.dim() == 2
        if alone:
            query, key, value = (each.unsqueeze(0 if self.batch_first else 1) for each in (query, key, value))
        if not self.batch_first:
            query, key, value = _batch_first(query, key, value)
        q, k, v = (
            product.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for product in self._products(query, key, value)
        )
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._mask(q, key_padding_mask, attn_mask)
        dropped = self.dropout if self.training else 0.0
        with self._region.drawing([Piece(1, self.num_heads, 1)]):
            if need_weights:
                weights = q @ k.transpose(-2, -1) / self.head_dim**0.5
                weights = F.dropout((weights if mask is None else weights + mask).softmax(-1), dropped)
                out = weights @ v
            else:
                weights, out = q, F.scaled_dot_product_attention(q, k, v, mask, dropped, causal)
        product = F.linear(out.transpose(1, 2).flatten(2), self.out_proj.weight)
        y = self._region.leave(product)
        y = y if self.out_proj.bias is None else y + self.out_proj.bias
        y = y if self.batch_first else y.transpose(0, 1)
        seen = self._seen(weights, average_attn_weights) if need_weights else None
        if alone:
            return y.squeeze(0 if self.batch_first else 1), None if seen is None else seen.squeeze(0)
        return y, seen

    def _products(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        inputs = [self._region.enter(query)]
        inputs.append(inputs[0] if key is query else self._region.enter(key))
        inputs.append(inputs[1] if value is key else self._region.enter(value))
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = tuple(cast(Tensor, getattr(self, f"{each}_proj_weight")) for each in "qkv")
        return [F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True)]

    def _mask(self, q: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Returns the summand of the scores [B, H, T, S] that both masks make; None for none."""
        found: Tensor | None = None
        if mask is not None:
            found = _added(mask, q)
            if found.dim() == 3:  # of all heads of all samples
                heads, found = q.shape[1], found.unflatten(0, (-1, self.num_heads))
                if heads < self.num_heads:  # all of them are here where the layer is tried with parts of its inputs
                    found = found.narrow(1, self._region.rank * heads, heads)
        if padding is not None:
            of_keys = _added(padding, q)
            of_keys = of_keys[:, None, None, :] if of_keys.dim() == 2 else of_keys[None, None, None, :]
            found = of_keys if found is None else found + of_keys
        return found

    def _seen(self, weights: Tensor, average: bool) -> Tensor:
        """Returns the weights of all heads, or their mean."""
        if average:
            return self._region.leave(weights.sum(1)) / self.num_heads
        heads = [self.num_heads // self._region.size] * self._region.size
        return self._region.whole(weights.movedim(1, -1), heads).movedim(-1, 1)


def _batch_first(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Transposes them, what is one tensor once."""
    q = query.transpose(0, 1)
    k = q if key is query else key.transpose(0, 1)
    return q, k, k if value is key else value.transpose(0, 1)


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Returns a mask as what is added to the scores: minus infinity where a bool one is set."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(mask, float("-inf"))
