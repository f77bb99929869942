"""Peers on one GPU, each as its users write it: torch FSDP2 and DeepSpeed ZeRO-3, the state on the device or on the
host.

bf16 as everywhere: weights and their gradients in bf16, fp32 masters and moments, the gradient's norm is taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.rows import stacked
from shoal.models import GPT, GPTConfig, causal_lm

LR = 3e-4


def fsdp2_step(
    config: GPTConfig, batch: int, device: str, offload: bool, recompute: bool = False
) -> Callable[[], float]:
    """`fully_shard` a block at a time and the root, with CPUOffloadPolicy where `offload`; fused AdamW where the state
    is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    on_gpu = device.startswith("cuda")
    _alone(on_gpu)
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (1,))
    model = GPT(config)
    policy = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy(),
    }
    if recompute:
        _recompute(model)
    for block in model.blocks:
        fully_shard(block, **policy)  # type: ignore[call-overload]
    fully_shard(model, **policy)  # type: ignore[call-overload]
    if not offload:
        model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    data = stacked(config, batch, pinned=device != "cpu")

    def step() -> float:
        total, count = causal_lm(model, {key: value.to(device, non_blocking=True) for key, value in data.items()})[:2]
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def deepspeed_step(config: GPTConfig, batch: int, device: str, recompute: bool = False) -> Callable[[], float]:
    """ZeRO-3 with weights and optimizer on the host, its CPUAdam (compiled at the first use). ImportError where it is
    not installed."""
    on_gpu = device.startswith("cuda")
    os.environ.update(
        {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", **({} if on_gpu else {"DS_ACCELERATOR": "cpu"})}
    )
    import deepspeed

    _alone(on_gpu)
    model = GPT(config)
    if recompute:
        _recompute(model)
    host = {"device": "cpu", "pin_memory": on_gpu}
    settings = {
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": 3, "offload_optimizer": host, "offload_param": host, "overlap_comm": True},
        "bf16": {"enabled": True},
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    data = stacked(config, batch, pinned=device != "cpu")

    def step() -> float:
        total, count = causal_lm(engine, {key: value.to(device, non_blocking=True) for key, value in data.items()})[:2]
        loss = total / count
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def _recompute(model: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.blocks = torch.nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)


def _alone(on_gpu: bool) -> None:
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
