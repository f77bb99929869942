"""The expert MLPs of a mixture of experts, as stacked matrices, and the sorting of tokens by expert.

Shape suffixes: N tokens of a microbatch, K experts per token, E experts, D d_model, F width of an expert, M pairs of a
    token and an expert, X and Y rows and columns of any matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shoal.device import has_grouped_products, to_device


class Pairs:
    """The pairs of a token and an expert that are computed, sorted by expert. Pairs with the index E were dropped.

    tokens: the token of each pair, int64 [M].
    counts: the number of pairs of each expert, a list of E; on fake tensors, which have no values, even shares.
    """

    def __init__(self, index_NK: Tensor, experts: int) -> None:
        self._shape = index_NK.shape
        flat = index_NK.flatten()
        if isinstance(flat, FakeTensor):
            self.counts = even_counts(len(flat), experts)
        else:
            self.counts = counted(flat, experts + 1)[:experts].tolist()
        self._order = flat.argsort(stable=True)[: sum(self.counts)]
        self.tokens = self._order // index_NK.shape[1]

    def combine(self, rows_MD: Tensor, weights_NK: Tensor) -> Tensor:
        """Returns the weighted sum of each token's expert rows, [N, D], summed in the precision of the weights."""
        every = rows_MD.new_zeros(self._shape.numel(), rows_MD.shape[1]).index_copy(0, self._order, rows_MD)
        return (every.view(*self._shape, rows_MD.shape[1]) * weights_NK.unsqueeze(-1)).sum(1).to(rows_MD.dtype)


def counted(values: Tensor, number: int) -> Tensor:
    """Counts how often each of 0 .. number - 1 is among `values`: int64 [number]."""
    return torch.zeros(number, dtype=torch.int64, device=values.device).scatter_add_(0, values, torch.ones_like(values))


def even_counts(whole: int, parts: int) -> list[int]:
    """Divides `whole` items into `parts` counts as evenly as possible."""
    return [whole // parts + (part < whole % parts) for part in range(parts)]


def by_expert(rows_MX: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """Multiplies the rows of each expert by the transpose of its matrix; by torch's grouped product where possible.

    rows_MX: rows sorted by expert, [M, X].
    weights: [E, Y, X].
    counts: the number of rows of each expert.

    Returns [M, Y].
    """
    if _grouped(rows_MX, weights):
        ends = to_device(torch.tensor(counts).cumsum(0).int(), rows_MX.device)
        return F.grouped_mm(rows_MX, weights.transpose(1, 2), offs=ends)
    parts = zip(rows_MX.split(counts), weights.unbind(), strict=True)
    return torch.cat([F.linear(rows, weight) for rows, weight in parts])


def _grouped(rows_MX: Tensor, weights: Tensor) -> bool:
    """Returns whether torch's grouped product can be used: its kernels need rows of whole 16 bytes, have no
    forward-mode derivative, and on GPUs are for bf16 from Ampere on."""
    if (
        isinstance(rows_MX, FakeTensor)
        or rows_MX.dtype == torch.float64
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.compiler.is_compiling()
    ):
        return False
    if not has_grouped_products(rows_MX):
        return False
    return all(size * rows_MX.element_size() % 16 == 0 for size in weights.shape[1:])


class Experts(nn.Module):
    """E MLPs without biases, as stacked matrices: `up_proj` [E, F, D] (GELU) or `gate_up_proj` [E, 2F, D] (SwiGLU), and
    `down_proj` [E, D, F]."""

    def __init__(self, experts: int, d_model: int, d_ff: int, mlp: str) -> None:
        super().__init__()
        self.num_experts, self.mlp = experts, mlp
        if mlp == "gelu":
            self.up_proj = nn.Parameter(torch.empty(experts, d_ff, d_model))
        else:
            self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * d_ff, d_model))
        self.down_proj = nn.Parameter(torch.empty(experts, d_model, d_ff))

    def forward(
        self, x_ND: Tensor, index_NK: Tensor, weights_NK: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        """Returns the weighted sum of the experts' outputs for each token, [N, D].

        index_NK, weights_NK: the experts of each token (E: dropped) and their weights.
        meanwhile: called once; where experts are on other ranks, while tokens travel.
        """
        if meanwhile is not None:
            meanwhile()
        pairs = Pairs(index_NK, self.num_experts)
        return pairs.combine(self.rows(x_ND[pairs.tokens], pairs.counts), weights_NK)

    def rows(self, x_MD: Tensor, counts: list[int]) -> Tensor:
        """Computes the experts on rows [M, D] that are sorted by expert, `counts[e]` of each."""
        if self.mlp == "gelu":
            inner_MF = F.gelu(by_expert(x_MD, self.up_proj, counts), approximate="tanh")
        else:
            gate_MF, up_MF = by_expert(x_MD, self.gate_up_proj, counts).chunk(2, -1)
            inner_MF = F.silu(gate_MF) * up_MF
        return by_expert(inner_MF, self.down_proj, counts)
