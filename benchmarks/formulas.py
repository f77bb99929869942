"""How many bytes a rank of a GPT needs while it trains, term by term. Pure functions; tests hold them against autograd
itself.

Suffix legend: N tokens of one rank's microbatch, D d_model, F width of the MLP, H heads, V vocabulary, L layers. The
model is `shoal.models.gpt.GPT` with learned positions, LayerNorm, GELU, biases, an untied head and no dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.models.gpt import GPTConfig
from shoal.models.presets import count_parameters

FP32, BF16 = 4, 2
"""Bytes of an element."""


@dataclass(frozen=True)
class MemoryTerms:
    """Bytes of one rank at the peak of a step, the interpreter not counted."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def shoal_terms(cfg: GPTConfig, rows: int, sequence: int, precision: str) -> MemoryTerms:
    """Replicated state. fp32: 4 + 4 + 8 bytes a parameter. bf16: weights 2, gradients in fp32 4, and in the optimizer
    the fp32 master 4 and two moments 8."""
    count = count_parameters(cfg)
    activations = saved_bytes(cfg, rows, sequence, precision) + loss_bytes(cfg, rows * sequence)
    if precision == "bf16":
        return MemoryTerms(BF16 * count, FP32 * count, 3 * FP32 * count, activations)
    return MemoryTerms(FP32 * count, FP32 * count, 2 * FP32 * count, activations)


def ddp_terms(cfg: GPTConfig, rows: int, sequence: int, precision: str) -> MemoryTerms:
    """torch DDP, gradients as views of its buckets. bf16 is autocast over fp32 weights: fp32 state, and the activations
    hold a bf16 copy of every matrix of a linear layer, which autograd saves for its backward."""
    count = count_parameters(cfg)
    activations = saved_bytes(cfg, rows, sequence, "autocast" if precision == "bf16" else "fp32") + loss_bytes(
        cfg, rows * sequence
    )
    return MemoryTerms(FP32 * count, FP32 * count, 2 * FP32 * count, activations)


def saved_bytes(cfg: GPTConfig, rows: int, sequence: int, precision: str) -> int:
    """What autograd keeps between the model's forward and its backward, the loss not counted; `precision` is fp32, bf16
    or autocast.

    A block keeps, per token: its input x, as LayerNorm's input (D); the normed x, as the input of qkv (D); q, k, v in
    one (3 D); the attention's output (D) and log-sum-exp (H, fp32); x after the attention (D), its normed form (D); the
    MLP's width before and after GELU (2 F); mean and 1/deviation of two LayerNorms (4, in the dtype of x). After the
    blocks: x, its normed form, one mean and 1/deviation. The embeddings keep only indices: those of the tokens are the
    batch itself; of the positions, T int64.

    Under autocast the residual stream x stays fp32, the other terms are bf16, and the linear layers' matrices (4 D D +
    2 D F a block, and the head's D V) are kept as bf16 copies.
    """
    tokens, width, ff = rows * sequence, cfg.d_model, cfg.ff
    stream = FP32 if precision in ("fp32", "autocast") else BF16
    inner = FP32 if precision == "fp32" else BF16
    block = 2 * stream * width + inner * (6 * width + 2 * ff) + FP32 * cfg.heads + 4 * stream
    last = stream * width + inner * width + 2 * stream
    saved = tokens * (cfg.layers * block + last) + 8 * sequence
    if precision == "autocast":
        saved += BF16 * (cfg.layers * (4 * width * width + 2 * width * ff) + width * cfg.vocab_size)
    return saved


def loss_bytes(cfg: GPTConfig, tokens: int) -> int:
    """The loss at its dearest moment, the backward of log-softmax: log-probabilities, their gradient and the logits'
    gradient, each N V in fp32. The logits are freed by then."""
    return 3 * FP32 * tokens * cfg.vocab_size
