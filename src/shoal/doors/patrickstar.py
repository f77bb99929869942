"""PatrickStar's configuration: chunk memory over all ranks, Adam on the host.

Two keys differ from PatrickStar, which misreads them: `hysteresis` has DeepSpeed's meaning (PatrickStar takes it for
the factor of the scale), and the threshold of `gradient_clipping` is constant (PatrickStar multiplies it by the loss
scale again for each parameter).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.device import total_memory
from shoal.doors.config import HONOURED, NO_EFFECT, REFUSED, Key, Settings, flag, inner, number
from shoal.errors import UserError, did_you_mean
from shoal.optim.fused.trial import tried_out

CHUNK_SIZE = 32 * 2**20
"""Default number of elements of a chunk."""

_PLACED = (
    "weights, masters and optimizer state have their home on the host, and what is brought to the device follows the "
    "plan of moves"
)

KEYS = {
    "optimizer.type": Key(HONOURED, '"Adam" (default) or "AdamW", as PatrickStar has; others are refused'),
    "optimizer.params.lr": Key(HONOURED, "0.01 by default"),
    "optimizer.params.betas": Key(HONOURED, "(0.9, 0.999) by default"),
    "optimizer.params.eps": Key(HONOURED, "1e-8 by default"),
    "optimizer.params.weight_decay": Key(HONOURED, "0 by default"),
    "optimizer.params.use_hybrid_adam": Key(NO_EFFECT, "updates run where the state is: on the host, in one kernel"),
    "fp16.enabled": Key(HONOURED, 'precision "fp16"; false, or no table fp16 at all, is "fp32"'),
    "fp16.loss_scale": Key(HONOURED, "0, the default, is a dynamic one"),
    "fp16.initial_scale_power": Key(HONOURED, "16 by default"),
    "fp16.loss_scale_window": Key(HONOURED, "2000 by default"),
    "fp16.hysteresis": Key(HONOURED, "2 by default, with DeepSpeed's meaning, which PatrickStar misreads"),
    "fp16.min_loss_scale": Key(HONOURED, "1 by default; an overflow at it stops the training"),
    "gradient_clipping": Key(
        HONOURED, "each element of the mean gradient is clamped to it; 0 or less, the default, does not"
    ),
    "default_chunk_size": Key(
        HONOURED, "elements of a chunk, 32 Mi by default; `plan.exchange.chunk_bytes` is four times that"
    ),
    "release_after_init": Key(
        NO_EFFECT, "initial values are made one tensor at a time: no rank ever holds the whole model"
    ),
    "use_cpu_embedding": Key(NO_EFFECT, _PLACED),
    "client.mem_tracer.overall_gpu_mem_ratio": Key(
        HONOURED, "`plan.memory.device` as a part of the GPU's memory, 0.8 by default"
    ),
    "client.mem_tracer.overall_cpu_mem_ratio": Key(NO_EFFECT, "the host is not rationed"),
    "client.mem_tracer.use_async_mem_monitor": Key(NO_EFFECT, "what each moment needs is recorded by the allocator"),
    "client.mem_tracer.warmup_gpu_chunk_mem_ratio": Key(NO_EFFECT, "the first step runs with as little as it can"),
    "client.mem_tracer.margin_use_ratio": Key(NO_EFFECT, _PLACED),
    "client.mem_tracer.with_static_partition": Key(NO_EFFECT, _PLACED),
    "client.mem_tracer.use_fake_dist": Key(
        REFUSED, "it pretends to have more ranks than there are: start as many, `shoal run --nproc N`"
    ),
    "client.opts.with_mem_saving_comm": Key(NO_EFFECT, "one chunk is gathered at a time"),
    "client.opts.with_mem_cache": Key(NO_EFFECT, "torch's allocator keeps freed memory"),
    "client.opts.with_async_move": Key(NO_EFFECT, "chunks always move beside the computation"),
}  # fmt: skip
OWN = ("default_chunk_size", "release_after_init", "use_cpu_embedding", "client")
"""Keys that only PatrickStar has."""


def translate(config: Mapping[str, Any], device: torch.device) -> Settings:
    """Translates `config`, whose keys have been checked. Raises UserError for an invalid value."""
    chunk = config.get("default_chunk_size", CHUNK_SIZE)
    if not isinstance(chunk, int) or isinstance(chunk, bool) or not 0 < chunk < 2**60:
        raise UserError(f"default_chunk_size = {chunk!r}: give the number of elements of a chunk, at least 1")
    clip = number(config, "gradient_clipping", -1)
    return Settings(
        optimizer=_optimizer(inner(config, "optimizer")),
        plan={
            "zero": 3,
            "memory": _memory(inner(inner(config, "client"), "client.mem_tracer"), device),
            "exchange": {"name": "allreduce", "chunk_bytes": 4 * chunk},
        },
        engine={"precision": _precision(inner(config, "fp16")), "clip_value": clip if clip > 0 else None},
    )


def _optimizer(table: Mapping[str, Any]) -> Any:
    kinds = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
    name = table.get("type", "Adam")
    if not isinstance(name, str) or name not in kinds:
        raise UserError(
            f'optimizer.type = "{name}": PatrickStar has {" and ".join(kinds)}.{did_you_mean(str(name), list(kinds))} '
            "A configuration of DeepSpeed's, with train_batch_size, takes others"
        )
    given = {key: value for key, value in inner(table, "optimizer.params").items() if key != "use_hybrid_adam"}
    params = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, **given}
    return tried_out(kinds[name], params, f"optimizer.params = {params!r:.300}")


def _precision(table: Mapping[str, Any]) -> str | dict[str, Any]:
    if not flag(table, "fp16.enabled", bool(table)):
        return "fp32"
    scaling = {key: value for key, value in table.items() if key != "enabled"}
    return {"name": "fp16", "loss_scale_window": 2000, **scaling}


def _memory(tracer: Mapping[str, Any], device: torch.device) -> dict[str, int]:
    """Returns `plan.memory`: a share of the GPU's memory; empty on a CPU, which has only one memory."""
    ratio = number(tracer, "client.mem_tracer.overall_gpu_mem_ratio", 0.8)
    if not 0 < ratio <= 1:
        raise UserError(
            f"client.mem_tracer.overall_gpu_mem_ratio = {ratio!r}: give a part of the GPU's memory, above 0 and up to 1"
        )
    total = total_memory(device)
    return {} if total is None else {"device": int(ratio * total)}
