"""A mixture of experts in place of an MLP: a router chooses, for each token, which few of many expert MLPs compute it.

Shape suffixes: N tokens of a microbatch, K experts a token, E experts, D d_model, F width of an expert, M pairs of a token and an expert.

    top-k, softmax or sigmoid       Shazeer et al. 2017, arXiv 1701.06538; DeepSeek-V3, arXiv 2412.19437, section 2.1.2
    capacity, balance loss          GShard, arXiv 2006.16668; Switch, arXiv 2101.03961, section 2.2
    z-loss                          ST-MoE, arXiv 2202.08906, equation 5
    balance by a bias               Wang et al. 2024, arXiv 2408.15664
    residual experts                DeepSpeed-MoE, arXiv 2201.05596, section 4.1
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shoal.errors import UserError
from shoal.models.checks import one_of, positive

JITTER = 0.01
"""By how much jitter scales a router's inputs at most (Switch, section 2.4)."""


@dataclass(frozen=True)
class MoEConfig:
    """The experts of a GPT.

    `experts`: how many; `per_token`: how many of them compute each token. `gate`: what makes scores of the router's logits. `normalize`: whether the
    weights of a token's experts add up to 1; None: where there are several. `noise` on the choice while training: "jitter" scales the router's inputs, "gaussian"
    (of deviation 1 / experts) and "gumbel" (experts are drawn by their probabilities) are added to the logits. `capacity_factor`: an expert takes so many times its even share of a microbatch's pairs; others are
    dropped: the last ones by "position", or those of the smallest weights by "probability". None: nothing is dropped. `balance_loss`, `z_loss`: factors of
    the two auxiliary losses. `balance_rate`: by how much a step changes the bias that an expert's share of tokens has on the choice. `shared`: experts that compute
    every token. `residual`: every token goes through an MLP and one expert more corrects it, weighed by a learned coefficient. `d_ff`: width of an expert; None:
    that of the MLP. `every`: each so many blocks one has experts.
    """

    experts: int
    per_token: int = 2
    gate: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool | None = None
    noise: Literal["none", "jitter", "gaussian", "gumbel"] = "none"
    capacity_factor: float | None = None
    drop: Literal["position", "probability"] = "position"
    balance_loss: float = 0.01
    z_loss: float = 0.0
    balance_rate: float = 0.0
    shared: int = 0
    residual: bool = False
    d_ff: int | None = None
    every: int = 1

    def __post_init__(self) -> None:
        for field in ("experts", "per_token", "every"):
            positive("MoEConfig", field, getattr(self, field))
        for field in ("d_ff", "capacity_factor"):
            if getattr(self, field) is not None:
                positive("MoEConfig", field, getattr(self, field))
        one_of("MoEConfig", "gate", self.gate, ("softmax", "sigmoid"))
        one_of("MoEConfig", "noise", self.noise, ("none", "jitter", "gaussian", "gumbel"))
        one_of("MoEConfig", "drop", self.drop, ("position", "probability"))
        if self.per_token > self.experts:
            raise UserError(f"MoEConfig: per_token={self.per_token} is more than experts={self.experts}.")
        for field in ("balance_loss", "z_loss", "balance_rate", "shared"):
            if getattr(self, field) < 0:
                raise UserError(f"MoEConfig: {field}={getattr(self, field)} must be at least 0.")

    @property
    def losses(self) -> dict[str, float]:
        """The factors of the auxiliary losses that there are, by name."""
        return {name: factor for name, factor in (("router", self.balance_loss), ("router_z", self.z_loss)) if factor}

    def capacity(self, tokens: int) -> int | None:
        """How many pairs an expert takes of a microbatch of so many `tokens`; None: all."""
        if self.capacity_factor is None:
            return None
        return max(1, math.ceil(self.capacity_factor * tokens * self.per_token / self.experts))


class Routing(NamedTuple):
    """`experts` [N, K]: of each token, E where one was dropped. `weights` [N, K]: theirs, fp32 or wider. `chosen` [N, K]: before anything was dropped.
    `losses` [2]: balance and z."""

    experts: Tensor
    weights: Tensor
    chosen: Tensor
    losses: Tensor


class Microbatch:
    """How a router sees the tokens of its microbatch: here all of them. Where ranks share a microbatch another one stands in its place, and what is decided of all
    tokens is decided alike."""

    def number(self, here: int) -> int:
        """How many tokens there are, of which `here` are here."""
        return here

    def whole(self, x: Tensor) -> Tensor:
        """Of values [n, ..] of the tokens here those of all, in the order of the whole microbatch; without a gradient."""
        return x

    def own(self, x: Tensor) -> Tensor:
        """Of values of all tokens those of the tokens here."""
        return x

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what is here and elsewhere; a loss of it is a loss of all tokens."""
        return x


class Router(nn.Module):
    """Scores of E experts for each token, in fp32 whatever the model computes in (in fp64 where that does).

    `microbatch` is replaced where ranks share one, `stream`, the generator of noise, where what is drawn must not depend on what others draw. The bias of an expert is its whole number `bias_steps` times `balance_rate`: `balance` adds to it
    after a step, and a checkpoint has it.
    """

    bias_steps: Tensor

    def __init__(self, cfg: MoEConfig, d_model: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.weight = nn.Parameter(torch.empty(cfg.experts, d_model))
        self.microbatch = Microbatch()
        self.stream: Callable[[], torch.Generator | None] | None = None
        if cfg.balance_rate:
            self.register_buffer("bias_steps", torch.zeros(cfg.experts, dtype=torch.int64))

    def forward(self, x_ND: Tensor) -> Routing:
        cfg = self.cfg
        x_ND = x_ND.to(torch.promote_types(x_ND.dtype, torch.float32))
        if self.training and cfg.noise == "jitter":
            x_ND = x_ND * self._drawn(x_ND).mul(2 * JITTER).add(1 - JITTER)
        logits_NE = F.linear(x_ND, self.weight.to(x_ND.dtype))
        scores_NE = logits_NE.softmax(-1) if cfg.gate == "softmax" else logits_NE.sigmoid()
        chosen_NK = self._ranked(logits_NE, scores_NE).topk(cfg.per_token).indices
        weights_NK = scores_NE.gather(1, chosen_NK)
        if cfg.normalize or (cfg.normalize is None and cfg.per_token > 1):
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True).clamp(min=1e-20)
        index_NK = chosen_NK
        if (capacity := cfg.capacity(self.microbatch.number(len(x_ND)))) is not None:
            index_NK = chosen_NK.masked_fill(~self._kept(chosen_NK, weights_NK, capacity), cfg.experts)
        return Routing(index_NK, weights_NK, chosen_NK, self._losses(logits_NE, scores_NE, chosen_NK))

    @torch.no_grad()
    def balance(self, counts_E: Tensor) -> None:
        """After a step in which the experts were chosen `counts_E` times: those above the mean become less likely, those below it more."""
        self.bias_steps += (counts_E.mean() - counts_E).sign().to(torch.int64)

    def _ranked(self, logits_NE: Tensor, scores_NE: Tensor) -> Tensor:
        """What the choice goes by."""
        ranked = scores_NE.detach()
        if self.training and self.cfg.noise == "gaussian":
            ranked = logits_NE.detach() + self._drawn(logits_NE, torch.randn) / self.cfg.experts
        elif self.training and self.cfg.noise == "gumbel":
            ranked = logits_NE.detach() - (-self._drawn(logits_NE).clamp(1e-20, 1 - 1e-7).log()).log()
        return ranked + self.bias_steps * self.cfg.balance_rate if self.cfg.balance_rate else ranked

    def _drawn(self, like: Tensor, draw: Callable[..., Tensor] = torch.rand) -> Tensor:
        """For the tokens here, of what is drawn for all."""
        number = self.microbatch.number(len(like))
        return self.microbatch.own(
            draw(number, like.shape[1], dtype=like.dtype, device=like.device, generator=self.stream and self.stream())
        )

    @torch.no_grad()
    def _kept(self, chosen_NK: Tensor, weights_NK: Tensor, capacity: int) -> Tensor:
        """[N, K]: the pairs that their expert takes."""
        whole = self.microbatch.whole(torch.stack([chosen_NK.to(weights_NK.dtype), weights_NK.detach()], -1))
        return self.microbatch.own(kept(whole[..., 0].long(), whole[..., 1], self.cfg.experts, capacity, self.cfg.drop))

    def _losses(self, logits_NE: Tensor, scores_NE: Tensor, chosen_NK: Tensor) -> Tensor:
        """Balance: E times the sum over experts of their share of the pairs times their mean score; 1 where all are alike. z: mean square of the log-sum-exp."""
        cfg = self.cfg
        if cfg.gate == "sigmoid":
            scores_NE = scores_NE / scores_NE.sum(-1, keepdim=True).clamp(min=1e-20)
        tokens = max(1, self.microbatch.number(len(logits_NE)))
        pairs_E = counted(chosen_NK.flatten(), cfg.experts).to(scores_NE.dtype)
        sums = torch.cat([scores_NE.sum(0), logits_NE.logsumexp(-1).square().sum()[None]])
        sums = self.microbatch.sum(sums) / tokens
        share_E = self.microbatch.sum(pairs_E) / (tokens * cfg.per_token)
        return torch.stack([cfg.experts * (sums[:-1] * share_E).sum(), sums[-1]])


def kept(chosen_NK: Tensor, weights_NK: Tensor, experts: int, capacity: int, drop: str) -> Tensor:
    """[N, K] bool: which pairs are among the first `capacity` of their expert. By "position" all first choices stand before all second ones (GShard), and
    tokens in their order; by "probability" larger weights stand first."""
    number, k = chosen_NK.shape
    expert = chosen_NK.T.flatten()
    order = torch.arange(number * k, device=expert.device)
    if drop == "probability":
        order = weights_NK.T.flatten().argsort(descending=True, stable=True)
    order = order[expert[order].argsort(stable=True)]
    counts = counted(expert, experts)
    place = torch.arange(number * k, device=expert.device) - (counts.cumsum(0) - counts)[expert[order]]
    return torch.empty_like(expert, dtype=torch.bool).scatter_(0, order, place < capacity).view(k, number).T


class Pairs:
    """The pairs of tokens and experts that are computed, sorted by expert: `tokens` [M], `counts` [E] of each expert. Pairs with the expert E are not. In a dry run,
    where nothing has values, experts have even shares."""

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
        """[N, D]: of each token the sum of its experts' rows, weighed in the precision of the weights."""
        every = rows_MD.new_zeros(self._shape.numel(), rows_MD.shape[1]).index_copy(0, self._order, rows_MD)
        return (every.view(*self._shape, rows_MD.shape[1]) * weights_NK.unsqueeze(-1)).sum(1).to(rows_MD.dtype)


def counted(values: Tensor, number: int) -> Tensor:
    """[number] int64: how often each of 0 .. number - 1 is among `values`."""
    return torch.zeros(number, dtype=torch.int64, device=values.device).scatter_add_(0, values, torch.ones_like(values))


def even_counts(whole: int, parts: int) -> list[int]:
    """`whole` things in as many `parts` as even as they can be."""
    return [whole // parts + (part < whole % parts) for part in range(parts)]


def by_expert(rows_MX: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """[M, Y]: the stretch of `counts[e]` rows of each expert times the transpose of its matrix, of `weights` [E, Y, X]; by torch's grouped product where it can."""
    if _grouped(rows_MX, weights):
        ends = torch.tensor(counts).cumsum(0).to(rows_MX.device, torch.int32)
        return F.grouped_mm(rows_MX, weights.transpose(1, 2), offs=ends)
    parts = zip(rows_MX.split(counts), weights.unbind(), strict=True)
    return torch.cat([F.linear(rows, weight) for rows, weight in parts])


def _grouped(rows_MX: Tensor, weights: Tensor) -> bool:
    """Its kernels take rows of whole 16 bytes, and have no derivative in forward mode. On a GPU they are for bf16, from Ampere on."""
    if (
        isinstance(rows_MX, FakeTensor)
        or rows_MX.dtype == torch.float64
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.compiler.is_compiling()
    ):
        return False
    if rows_MX.is_cuda and (rows_MX.dtype != torch.bfloat16 or torch.cuda.get_device_capability(rows_MX.device) < (8, 0)):
        return False
    return all(size * rows_MX.element_size() % 16 == 0 for size in weights.shape[1:])


class Experts(nn.Module):
    """E MLPs without biases, in stacked matrices: `up_proj` [E, F, D] with GELU, or `gate_up_proj` [E, 2F, D] with SwiGLU; `down_proj` [E, D, F]."""

    def __init__(self, experts: int, d_model: int, d_ff: int, mlp: str) -> None:
        super().__init__()
        self.num_experts, self.mlp = experts, mlp
        if mlp == "gelu":
            self.up_proj = nn.Parameter(torch.empty(experts, d_ff, d_model))
        else:
            self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * d_ff, d_model))
        self.down_proj = nn.Parameter(torch.empty(experts, d_model, d_ff))

    def forward(self, x_ND: Tensor, index_NK: Tensor, weights_NK: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """[N, D]. `meanwhile` is called once, at a time that suits: where experts are elsewhere, while tokens are on their way."""
        if meanwhile is not None:
            meanwhile()
        pairs = Pairs(index_NK, self.num_experts)
        return pairs.combine(self.rows(x_ND[pairs.tokens], pairs.counts), weights_NK)

    def rows(self, x_MD: Tensor, counts: list[int]) -> Tensor:
        """What the experts make of rows that are sorted by expert, `counts[e]` of each."""
        if self.mlp == "gelu":
            inner_MF = F.gelu(by_expert(x_MD, self.up_proj, counts), approximate="tanh")
        else:
            gate_MF, up_MF = by_expert(x_MD, self.gate_up_proj, counts).chunk(2, -1)
            inner_MF = F.silu(gate_MF) * up_MF
        return by_expert(inner_MF, self.down_proj, counts)


class MoE(nn.Module):
    """Router, experts, and what computes every token beside them. `dense(width)` makes an MLP of so many times the width of an expert."""

    def __init__(self, cfg: MoEConfig, d_model: int, d_ff: int, mlp: str, dense: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.cfg = cfg
        self.router = Router(cfg, d_model)
        self.experts = Experts(cfg.experts, d_model, d_ff, mlp)
        self.shared = dense(cfg.shared) if cfg.shared else None
        self.residual = dense(1) if cfg.residual else None
        self.coefficient = nn.Linear(d_model, 2) if cfg.residual else None

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, D], and the losses [2] of the router."""
        beside: dict[str, Tensor] = {}

        def meanwhile() -> None:
            if self.shared is not None:
                beside["shared"] = self.shared(x_BTD)
            if self.residual is not None:
                beside["residual"] = self.residual(x_BTD)

        routing = self.router(x_BTD.flatten(0, -2))
        y_BTD = self.experts(x_BTD.flatten(0, -2), routing.experts, routing.weights, meanwhile).view_as(x_BTD)
        if self.coefficient is not None:
            moe, dense = self.coefficient(x_BTD).softmax(-1).unbind(-1)
            y_BTD = y_BTD * moe.unsqueeze(-1) + beside["residual"] * dense.unsqueeze(-1)
        if self.shared is not None:
            y_BTD = y_BTD + beside["shared"]
        return y_BTD, routing.losses


class WithLosses(NamedTuple):
    """What a model with experts returns: `logits` [B, T, V], and its auxiliary losses by name, with their factors."""

    logits: Any
    losses: dict[str, Tensor]
