"""Named GPT sizes, and what a GPT costs: parameters and FLOPs by formula, without building it."""

from __future__ import annotations

from shoal.models.gpt import GPTConfig

# 1m to 15m: modern small models on bytes or a small BPE, for demonstrations and tests on a few cores.
# 33m: learned positions and an untied head, the model of the data-parallel benchmark.
# 124m: GPT-2 (Radford et al. 2019). 350m to 6.7b: the sizes of GPT-3 (Brown et al. 2020, table 2.1) with GPT-2's
# vocabulary; 1.3b has 16 heads of 128, because the 24 heads printed there do not divide 2048.
# 13b: CodeGeeX (Zheng et al. 2023, https://arxiv.org/abs/2303.17568): 39 layers and one "top query" layer of the same
# shape, hidden 5120, 40 heads, MLP 20480, sequence 2048, vocabulary 52224 with the head tied to the embedding. Ours
# differs in three points: the 40th layer is an ordinary block, so there is no table of query embeddings (2048 x 5120,
# 0.08% of the weights); the last norm stands after that layer, not before it; GELU has its tanh form in place of
# FastGELU.
PRESETS: dict[str, GPTConfig] = {
    "1m": GPTConfig(257, 256, 5, 128, 4, positions="rotary", mlp="swiglu", norm="rmsnorm", bias=False),
    "5m": GPTConfig(257, 256, 6, 256, 4, positions="rotary", mlp="swiglu", norm="rmsnorm", bias=False),
    "15m": GPTConfig(4096, 256, 8, 384, 6, positions="rotary", mlp="swiglu", norm="rmsnorm", bias=False),
    "33m": GPTConfig(8192, 256, 8, 512, 8, tied=False),
    "124m": GPTConfig(50257, 1024, 12, 768, 12),
    "350m": GPTConfig(50257, 2048, 24, 1024, 16),
    "760m": GPTConfig(50257, 2048, 24, 1536, 16),
    "1.3b": GPTConfig(50257, 2048, 24, 2048, 16),
    "2.7b": GPTConfig(50257, 2048, 32, 2560, 32),
    "6.7b": GPTConfig(50257, 2048, 32, 4096, 32),
    "13b": GPTConfig(52224, 2048, 40, 5120, 40),
}


def _block_matrix_weights(cfg: GPTConfig, block: int, used: bool = False) -> int:
    """Counts the weights of one block's matrices, without biases; `used`: only experts that compute a token."""
    attention = cfg.d_model * cfg.head_size * (cfg.heads + 2 * cfg.key_value_heads) + cfg.d_model**2
    matrices, moe = 2 if cfg.mlp == "gelu" else 3, cfg.moe
    if moe is None or not cfg.has_experts(block):
        return attention + matrices * cfg.d_model * cfg.ff
    width = moe.d_ff or cfg.ff
    mlps = (moe.per_token if used else moe.experts) + moe.shared + moe.residual
    return attention + matrices * cfg.d_model * width * mlps + cfg.d_model * (moe.experts + 2 * moe.residual)


def _block_biases(cfg: GPTConfig, block: int) -> int:
    """Counts the biases of the linear layers of one block with biases: qkv and out, up (and gate) and down."""
    attention = cfg.head_size * (cfg.heads + 2 * cfg.key_value_heads) + cfg.d_model
    matrices, moe = 1 if cfg.mlp == "gelu" else 2, cfg.moe
    if moe is None or not cfg.has_experts(block):
        return attention + matrices * cfg.ff + cfg.d_model
    width = moe.d_ff or cfg.ff
    shared = matrices * moe.shared * width + cfg.d_model if moe.shared else 0
    return attention + shared + (matrices * width + cfg.d_model) * moe.residual


def _coefficients(cfg: GPTConfig, block: int) -> int:
    """Counts the biases of the coefficient of residual experts, which are always there."""
    return 2 if cfg.moe is not None and cfg.moe.residual and cfg.has_experts(block) else 0


def count_parameters(cfg: GPTConfig) -> int:
    """Returns the number of parameters of `GPT(cfg)`; a tied head counts once."""
    norm = cfg.d_model * (2 if cfg.norm == "layernorm" and cfg.bias else 1)
    blocks = sum(
        _block_matrix_weights(cfg, block)
        + 2 * norm
        + (_block_biases(cfg, block) if cfg.bias else 0)
        + _coefficients(cfg, block)
        for block in range(cfg.layers)
    )
    embeddings = cfg.vocab_size * cfg.d_model * (1 if cfg.tied else 2)
    positions = cfg.sequence * cfg.d_model if cfg.positions == "learned" else 0
    return embeddings + positions + blocks + norm


def flops_per_token(cfg: GPTConfig, sequence: int) -> float:
    """Returns the FLOPs of one token's forward and backward in rows of `sequence` tokens.

    6 N + 12 L D T, where N is the number of weights in matrix products: with the head, without the embedding, and of
    experts only those that compute a token (Chowdhery et al. 2022, PaLM, appendix B). As there, attention is counted in
    full although half of it is masked, and recomputation is not counted.
    """
    weights = (
        sum(_block_matrix_weights(cfg, block, used=True) for block in range(cfg.layers)) + cfg.vocab_size * cfg.d_model
    )
    return 6.0 * weights + 12.0 * cfg.layers * cfg.d_model * sequence
