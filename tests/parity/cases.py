"""The models of the parity matrix, each with data and loss, small enough for twenty steps in a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal import lr
from shoal.engine import Engine
from shoal.models import (
    GPT,
    LSTM,
    MLP,
    Bert,
    BertConfig,
    GPTConfig,
    LSTMConfig,
    MoEConfig,
    ResNet,
    ResNetConfig,
    causal_lm,
    classification,
    from_config,
    masked_lm,
    regression,
)
from shoal.optim.groups import decay_matrices_only
from shoal.parallel import Layout

SAMPLES, GLOBAL_BATCH = 41, 12  # four steps an epoch, the last of 5 samples
EVEN = SAMPLES - SAMPLES % GLOBAL_BATCH  # of these all batches are alike, so that what is compiled once is not again
SCHEDULE = lr.cosine(20, warmup=3)


ADAMW = partial(torch.optim.AdamW, lr=3e-3)


@dataclass(frozen=True)
class Case:
    """What to train. `plain`: a hand-written torch loop can follow it (no dropout, which is keyed by sample)."""

    factory: Callable[[], nn.Module]
    loss: Callable[..., Any]
    data: Callable[[], list[dict[str, Tensor]]]
    plain: bool = True
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW


def text(vocabulary: int = 61, sequence: int = 12) -> list[dict[str, Tensor]]:
    """Rows with a fifth of the labels ignored, unevenly, so that counts differ between microbatches."""
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(0, vocabulary, (SAMPLES, sequence + 1), generator=draw)
    ignored = torch.rand(SAMPLES, sequence, generator=draw) < torch.rand(SAMPLES, 1, generator=draw) * 0.4
    return [
        {"input_ids": row[:-1], "labels": row[1:].masked_fill(mask, -100)}
        for row, mask in zip(rows, ignored, strict=True)
    ]


def images() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [
        {"inputs": torch.randn(3, 12, 12, generator=draw), "labels": torch.randint(0, 5, (), generator=draw)}
        for _ in range(SAMPLES)
    ]


def vectors() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [
        {"inputs": torch.randn(10, generator=draw), "targets": torch.randn(3, generator=draw)} for _ in range(SAMPLES)
    ]


class SometimesUnused(nn.Module):
    """One layer never used, one only where a sample's first feature is large, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 16)
        self.never = nn.Linear(16, 16)
        self.rare = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.outer = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(self.inner(x).tanh())
        if (x[:, 0] > 1.5).any():
            h = h + self.rare(h)
        return self.outer(h.tanh())


class TwoLosses(nn.Module):
    """Gives its result and a balance term, as a router would."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Linear(16, 3))
        self.gate = nn.Linear(10, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), self.gate(x).softmax(-1).mean(0).square().sum()


def two_losses(model: nn.Module, mb: dict[str, Tensor]) -> Any:
    y, balance = model(mb["inputs"])
    weight = torch.full((), 3.0)
    return (
        F.mse_loss(y, mb["targets"].to(y.dtype), reduction="sum"),
        y.shape[0],
        {"balance": (balance * 0.3, weight), "size": y.square().mean() * 0.01},
    )


LLAMA = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}

GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
GPT2 |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
}


def _gpt(**fields: Any) -> GPT:
    return GPT(GPTConfig(vocab_size=61, sequence=12, layers=2, d_model=32, heads=4, **fields))


CASES: dict[str, Case] = {
    "gpt": Case(_gpt, causal_lm, text),
    "gpt-rotary-dropout": Case(
        partial(_gpt, positions="rotary", mlp="swiglu", norm="rmsnorm", kv_heads=2, dropout=0.2),
        causal_lm,
        text,
        plain=False,
    ),
    "llama": Case(lambda: from_config(LLAMA)(), causal_lm, text),
    "mixtral": Case(lambda: from_config(MIXTRAL)(), causal_lm, text, plain=False),
    "resnet-batchnorm": Case(
        lambda: ResNet(ResNetConfig(depth=20, classes=5)),
        classification,
        images,
        optimizer=partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
    ),
    "lstm": Case(lambda: LSTM(LSTMConfig(vocab_size=61, embedding=24, hidden=32)), causal_lm, text),
    "mlp-dropout": Case(lambda: MLP((10, 32, 32, 3), "tanh", 0.3), regression, vectors, plain=False),
    "tied": Case(partial(_gpt, tied=True), causal_lm, text),
    "unused-frozen": Case(SometimesUnused, regression, vectors),
    "auxiliary": Case(TwoLosses, two_losses, vectors),
    "gpt2": Case(lambda: from_config(GPT2)(), causal_lm, text),
    "moe": Case(partial(_gpt, mlp="swiglu", moe=MoEConfig(4, shared=1, z_loss=1e-3, d_ff=24)), causal_lm, text),
    "moe-capacity": Case(
        partial(
            _gpt,
            positions="rotary",
            dropout=0.1,
            moe=MoEConfig(
                8,
                gate="sigmoid",
                noise="gumbel",
                capacity_factor=1.0,
                drop="probability",
                balance_rate=0.01,
                residual=True,
                d_ff=12,
            ),
        ),
        causal_lm,
        text,
        plain=False,
    ),
    "moe-top1": Case(
        partial(_gpt, moe=MoEConfig(4, 1, noise="jitter", capacity_factor=0.75, every=2)), causal_lm, text, plain=False
    ),
    "bert": Case(
        lambda: Bert(BertConfig(vocab_size=61, sequence=12, layers=2, d_model=32, heads=4, dropout=0.0)),
        masked_lm,
        text,
    ),
}
DEEP: dict[str, Case] = {
    "gpt-deep": Case(
        partial(
            GPT, GPTConfig(61, 12, 8, 16, 4, kv_heads=2, positions="rotary", mlp="swiglu", norm="rmsnorm", dropout=0.1)
        ),
        causal_lm,
        text,
        plain=False,
    ),
    "llama-deep": Case(
        lambda: from_config({**LLAMA, "num_hidden_layers": 8, "tie_word_embeddings": True})(),
        causal_lm,
        text,
        plain=False,
    ),
    "lstm-deep": Case(
        lambda: LSTM(LSTMConfig(vocab_size=61, embedding=16, hidden=16, layers=8, dropout=0.1)),
        causal_lm,
        text,
        plain=False,
    ),
    "moe-deep": Case(
        partial(
            GPT, GPTConfig(61, 12, 4, 16, 4, moe=MoEConfig(4, shared=1, noise="gumbel", z_loss=1e-3, d_ff=16, every=2))
        ),
        causal_lm,
        text,
        plain=False,
    ),
}
"""Deep enough for several stages."""
CASES |= DEEP
MESH_ONLY = ("gpt2", "bert", "moe-capacity", "moe-top1", *DEEP)
"""Further models for plans that cut one; under the others they are what the ones above are."""


def engine(case: str, precision: str, accumulation: int, **more: Any) -> Engine:
    """The engine of a row."""
    chosen = CASES[case]
    return Engine(chosen.factory, chosen.loss, chosen.optimizer, **{**arguments(precision, accumulation), **more})


def arguments(precision: str, accumulation: int) -> dict[str, Any]:
    """How a row is trained. The microbatch is that of four ranks with `accumulation`, whatever the number of ranks."""
    return {
        "global_batch": GLOBAL_BATCH,
        "microbatch": GLOBAL_BATCH // (4 * accumulation),
        # no overflow at first
        "precision": {"name": "fp16", "initial_scale_power": 8} if precision == "fp16" else precision,
        "clip": 0.8,
        "schedule": SCHEDULE,
        "param_groups": decay_matrices_only(0.1),
    }


@dataclass(frozen=True)
class Trace:
    """What a run did: per-step numbers, the gradients applied at the first step, and what it ended with: masters, and
    what the module sees; the loss over all its data, None where that was not asked for."""

    losses: list[float]
    norms: list[float]
    aux: list[dict[str, float]]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    seen: dict[str, Tensor]
    buffers: dict[str, Tensor]
    evaluation: float | None


def gathered(running: Engine, tensors: dict[str, Tensor], cut: bool = True) -> dict[str, Tensor]:
    """Whole tensors in the order of the module's parameters: this rank's own, or put together where each rank has a
    part of them. `cut`: they are what the optimizer has, which plan.zero cuts.

    What several ranks have is compared: who puts together the same on every rank sees no difference afterwards."""
    if running.plan.size == running.plan.dp and running.plan.ep == 1 and not (cut and running.plan.zero):
        return {name: tensor.clone() for name, tensor in tensors.items()}
    slots = running.optimizer.slots
    mine = [
        (
            name,
            running.layouts[name],
            slots[name].start if cut and name in slots else 0,
            tensor.detach().reshape(-1).clone(),
        )
        for name, tensor in tensors.items()
    ]
    parts: dict[str, dict[Layout, dict[int, Tensor]]] = {}
    for rank, theirs in enumerate(running.world.everyone.all_gather_object(mine)):
        for name, layout, start, flat in theirs:
            first = parts.setdefault(name, {}).setdefault(layout, {}).setdefault(start, flat)
            assert torch.equal(first, flat), f"rank {rank} has another {name} than a rank with the same part of it"
    whole = {}
    for name, by_layout in parts.items():
        layout, flats = next(iter(by_layout.items()))
        whole[name] = next(iter(flats.values())).new_full(layout.shape, torch.nan)
        for layout, flats in by_layout.items():
            layout.put_into(whole[name], torch.cat([flat for _, flat in sorted(flats.items())]).view(layout.own_shape))
    return whole if running.plan.pp > 1 else {name: whole[name] for name in running.parameters if name in whole}


def derivatives_of(running: Engine, case: str) -> tuple[Tensor, ...]:
    """Value, slope, gradient and a product with the Hessian on the data of `case`, in the same direction under any
    plan."""
    objective = running.objective(next(iter(running.batches(CASES[case].data()))))
    weights = {name: value.detach() for name, value in running.parameters.items()}
    draw = torch.Generator().manual_seed(0)
    direction = {
        name: layout.own_part(torch.randn(layout.shape, generator=draw, dtype=torch.float64))
        for name, layout in running.layouts.items()
    }
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel of the CPU has no derivative in forward mode
        value, slope = torch.func.jvp(objective, (weights,), (direction,))
        gradient, product = torch.func.jvp(torch.func.grad(objective), (weights,), (direction,))
    return value, slope, gathered(running, gradient, cut=False), gathered(running, product, cut=False)


def train(running: Engine, data: list[dict[str, Tensor]], steps: int, evaluates: bool = True) -> Trace:
    """Trains `steps` steps and evaluates."""
    losses, norms, aux, gradients = [], [], [], dict[str, Tensor]()
    for batch in running.batches(data, steps=steps):
        out = running.step(batch)
        if not losses:
            gradients = gathered(running, {name: running.optimizer.grad(name) for name in running.optimizer.parameters})
        losses.append(out.loss)
        norms.append(out.grad_norm)
        aux.append(out.aux)
    weights = gathered(running, {name: value.detach() for name, value in running.optimizer.parameters.items()})
    buffers = {name: buffer.clone() for name, buffer in running.module.named_buffers()}
    if running.plan.pp > 1:
        buffers = {
            name: buffer
            for theirs in running.world.everyone.all_gather_object(buffers)
            for name, buffer in theirs.items()
        }
    with running.whole_weights():
        seen = gathered(
            running, {name: parameter.detach() for name, parameter in running.parameters.items()}, cut=False
        )
    evaluation = running.evaluate(data).loss if evaluates else None
    return Trace(losses, norms, aux, gradients, weights, seen, buffers, evaluation)
