"""A mixture of experts in place of an MLP: a router chooses, for each token, which few of many expert MLPs compute it.

Shape suffixes: B batch, T sequence, N tokens of a microbatch, K experts per token, E experts, D d_model.

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

from shoal.errors import ArgumentError
from shoal.models.checks import one_of, positive
from shoal.models.experts import Experts, counted

JITTER = 0.01
"""Relative size of jitter on a router's inputs at most (Switch, section 2.4)."""


@dataclass(frozen=True)
class MoEConfig:
    """The experts of a GPT.

    experts: number of experts.
    per_token: number of experts that compute each token.
    gate: makes scores of the router's logits.
    normalize: the weights of a token's experts add up to 1; None: only where there are several.
    noise: on the choice while training: "jitter" scales the router's inputs; "gaussian" (of deviation 1 / experts) and
        "gumbel" (experts are sampled by their probabilities) are added to the logits.
    capacity_factor: an expert takes at most this multiple of its even share of a microbatch's pairs of a token and an
        expert; None: all.
    drop: the pairs over capacity that are dropped: the last ones ("position"), or those of the smallest weights
        ("probability").
    balance_loss, z_loss: factors of the two auxiliary losses.
    balance_rate: change per step of the bias that balances the choices of experts.
    shared: number of experts that compute every token.
    residual: an MLP computes every token, and the chosen experts correct it, weighted by a learned coefficient.
    d_ff: width of an expert; None: that of the MLP.
    every: each `every`-th block has experts.
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
            positive("MoE", field, getattr(self, field))
        for field in ("d_ff", "capacity_factor"):
            if getattr(self, field) is not None:
                positive("MoE", field, getattr(self, field))
        one_of("MoE", "gate", self.gate, ("softmax", "sigmoid"))
        one_of("MoE", "noise", self.noise, ("none", "jitter", "gaussian", "gumbel"))
        one_of("MoE", "drop", self.drop, ("position", "probability"))
        if self.per_token > self.experts:
            raise ArgumentError("per_token", f" = {self.per_token} of MoE is more than experts = {self.experts}.")
        for field in ("balance_loss", "z_loss", "balance_rate", "shared"):
            if getattr(self, field) < 0:
                raise ArgumentError(field, f" = {getattr(self, field)} of MoE must be at least 0.")

    @property
    def losses(self) -> dict[str, float]:
        """The factors of the auxiliary losses that are in use, by name."""
        return {name: factor for name, factor in (("router", self.balance_loss), ("router_z", self.z_loss)) if factor}

    def capacity(self, tokens: int) -> int | None:
        """Returns the number of pairs that an expert takes of a microbatch of `tokens` tokens; None: all."""
        if self.capacity_factor is None:
            return None
        return max(1, math.ceil(self.capacity_factor * tokens * self.per_token / self.experts))


class Routing(NamedTuple):
    """The experts of each token.

    experts: int64 [N, K], E where a pair was dropped.
    weights: [N, K], fp32 or wider.
    chosen: int64 [N, K], before dropping.
    losses: [2], balance and z.
    """

    experts: Tensor
    weights: Tensor
    chosen: Tensor
    losses: Tensor


class Microbatch:
    """The tokens of a microbatch as a router sees them; here one device has all of them. A subclass replaces it where
    ranks share a microbatch, so that decisions over all tokens are the same on those ranks."""

    def number(self, here: int) -> int:
        """Returns the number of tokens of the whole microbatch, of which `here` are on this rank."""
        return here

    def whole(self, x: Tensor) -> Tensor:
        """Gathers values [n, ...] of this rank's tokens to those of the whole microbatch, in order; no gradient."""
        return x

    def own(self, x: Tensor) -> Tensor:
        """Returns the values of this rank's tokens, given those of the whole microbatch."""
        return x

    def sum(self, x: Tensor) -> Tensor:
        """Sums `x` over the ranks that share the microbatch; differentiable."""
        return x


class Router(nn.Module):
    """Chooses the experts of each token by scores, which are computed in fp32 (in fp64 in an fp64 model).

    microbatch: replaced where ranks share a microbatch.
    stream: returns the generator of noise; replaced where the noise must not depend on other draws.
    bias_steps: int64 [E]; the bias of an expert is `balance_rate` times it. `balance` updates it; checkpoints save it.
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
        """Updates the bias after a step in which experts were chosen `counts_E` times: experts above the mean become
        less likely, those below it more."""
        self.bias_steps += (counts_E.mean() - counts_E).sign().to(torch.int64)

    def _ranked(self, logits_NE: Tensor, scores_NE: Tensor) -> Tensor:
        """Returns the values [N, E] by which experts are chosen: scores or noisy logits, with the bias."""
        ranked = scores_NE.detach()
        if self.training and self.cfg.noise == "gaussian":
            ranked = logits_NE.detach() + self._drawn(logits_NE, torch.randn) / self.cfg.experts
        elif self.training and self.cfg.noise == "gumbel":
            ranked = logits_NE.detach() - (-self._drawn(logits_NE).clamp(1e-20, 1 - 1e-7).log()).log()
        return ranked + self.bias_steps * self.cfg.balance_rate if self.cfg.balance_rate else ranked

    def _drawn(self, like: Tensor, draw: Callable[..., Tensor] = torch.rand) -> Tensor:
        """Draws noise for the whole microbatch and returns that of this rank's tokens, of the shape of `like`."""
        shape = self.microbatch.number(len(like)), like.shape[1]
        generator = self.stream and self.stream()
        return self.microbatch.own(draw(*shape, dtype=like.dtype, device=like.device, generator=generator))

    @torch.no_grad()
    def _kept(self, chosen_NK: Tensor, weights_NK: Tensor, capacity: int) -> Tensor:
        """Returns which pairs are within the capacity of their expert, bool [N, K]."""
        whole = self.microbatch.whole(torch.stack([chosen_NK.to(weights_NK.dtype), weights_NK.detach()], -1))
        return self.microbatch.own(kept(whole[..., 0].long(), whole[..., 1], self.cfg.experts, capacity, self.cfg.drop))

    def _losses(self, logits_NE: Tensor, scores_NE: Tensor, chosen_NK: Tensor) -> Tensor:
        """Returns the two auxiliary losses [2].

        Balance: E times the sum over experts of their share of the pairs times their mean score; 1 where all are equal.
        z: mean square of the log-sum-exp of the logits.
        """
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
    """Returns which pairs are among the first `capacity` of their expert, bool [N, K].

    drop: the order of the pairs of an expert: by "position" all first choices precede all second ones (GShard), in the
        order of tokens; by "probability" larger weights come first.
    """
    number, k = chosen_NK.shape
    expert = chosen_NK.T.flatten()
    order = torch.arange(number * k, device=expert.device)
    if drop == "probability":
        order = weights_NK.T.flatten().argsort(descending=True, stable=True)
    order = order[expert[order].argsort(stable=True)]
    counts = counted(expert, experts)
    position = torch.arange(number * k, device=expert.device) - (counts.cumsum(0) - counts)[expert[order]]
    return torch.empty_like(expert, dtype=torch.bool).scatter_(0, order, position < capacity).view(k, number).T


class MoE(nn.Module):
    """Router and experts, with the shared or residual MLPs that compute every token.

    d_ff: width of an expert.
    mlp: "gelu" or "swiglu".
    dense: makes an MLP, given its width in multiples of an expert's.
    """

    def __init__(self, cfg: MoEConfig, d_model: int, d_ff: int, mlp: str, dense: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.cfg = cfg
        self.router = Router(cfg, d_model)
        self.experts = Experts(cfg.experts, d_model, d_ff, mlp)
        self.shared = dense(cfg.shared) if cfg.shared else None
        self.residual = dense(1) if cfg.residual else None
        self.coefficient = nn.Linear(d_model, 2) if cfg.residual else None

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns [B, T, D], and the losses [2] of the router."""
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
    """The output of a model with experts: logits [B, T, V], and its auxiliary losses by name, times their factors."""

    logits: Any
    losses: dict[str, Tensor]
