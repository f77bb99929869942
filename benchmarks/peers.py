"""One builder a peer: what its users write, for the model of `workload`.

All take fused AdamW, the same batches and the same loss. A builder's docstring says what the peer does with bf16,
because that is not one thing. `none_by_hand` is no peer but the check on the limit: a plain loop without communication.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.processes import Step
from benchmarks.workload import LEARNING_RATE, Case, Tokens, build_model, mean_loss


def none_by_hand(case: Case, precision: str, norm: bool = False) -> Step:
    """No communication: every rank trains its own replica on its own share. bf16: weights in bf16, gradients in fp32
    (`grad_dtype`), fp32 masters in the optimizer: the meaning that Shoal gives to bf16. `norm`: as Shoal does, each
    step takes the norm of the gradient and refuses one that is not finite."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model, shares = build_model(), _shares(case, rank, size)
    look = _require_finite if norm else _leave_alone
    if precision == "fp32":
        optimizer = _adamw(model)

        def step() -> None:
            _forward_backward(model, *next(shares))
            look(model)
            optimizer.step()
            optimizer.zero_grad()

        return step

    masters: list[Tensor] = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    model.to(torch.bfloat16)
    weights: list[Tensor] = list(model.parameters())
    for weight in weights:
        weight.grad_dtype = torch.float32
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, fused=True)

    def master_step() -> None:
        _forward_backward(model, *next(shares))
        look(model)
        for master, weight in zip(masters, weights, strict=True):
            master.grad, weight.grad = weight.grad, None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)

    return master_step


def ddp(case: Case, precision: str) -> Step:
    """torch DDP with its default buckets and gradients as views of them. bf16: autocast over fp32 weights, gradients
    and exchange in fp32."""
    return _ddp(case, _autocast(precision))


def ddp_pure(case: Case, precision: str) -> Step:
    """torch DDP with weights, gradients, exchange and AdamW's state all in bf16: half the bytes everywhere, and less
    precise than every other row (a weight does not move when its update is below 1/256 of it)."""
    assert precision == "bf16"
    return _ddp(case, nullcontext(), torch.bfloat16)


def fsdp2(case: Case, precision: str) -> Step:
    """torch FSDP2 (`fully_shard`, a block at a time and the root): parameters, gradients and state sharded. bf16:
    MixedPrecisionPolicy with parameters in bf16, gradients reduced in fp32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank, size = _init_gloo()
    mesh = init_device_mesh("cpu", (size,))
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if precision == "bf16"
        else MixedPrecisionPolicy()
    )
    model, shares = build_model(), _shares(case, rank, size)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = _adamw(model)

    def step() -> None:
        _forward_backward(model, *next(shares))
        optimizer.step()
        optimizer.zero_grad()

    return step


def accelerate(case: Case, precision: str) -> Step:
    """Hugging Face Accelerate: `prepare` wraps in DDP (here with gradients as views of the buckets). bf16: its mixed
    precision, autocast over fp32 weights and logits cast to fp32."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    rank, size = _init_gloo()
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if precision == "bf16" else "no",
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    plain, shares = build_model(), _shares(case, rank, size)
    model, optimizer = accelerator.prepare(plain, _adamw(plain))

    def step() -> None:
        tokens, labels = next(shares)
        accelerator.backward(mean_loss(model(tokens), labels))
        optimizer.step()
        optimizer.zero_grad()

    return step


def deepspeed_zero(case: Case, precision: str, stage: int) -> Step:
    """DeepSpeed ZeRO: optimizer state (stage 1), gradients (2), parameters (3) sharded. bf16: its bf16 mode, weights in
    bf16, gradients exchanged in bf16, fp32 masters sharded with the state. Its shared-memory collectives for one host
    are compiled at the first use (needs ninja)."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    rank, size = _init_gloo()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model, shares = build_model(), _shares(case, rank, size)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=_adamw(model),
        config={
            "train_micro_batch_size_per_gpu": case.batch // size,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": precision == "bf16"},
            "steps_per_print": 1_000_000,
        },
    )

    def step() -> None:
        tokens, labels = next(shares)
        engine.backward(mean_loss(engine(tokens), labels))
        engine.step()

    return step


def deepspeed_moe(case: Case, precision: str, drop: bool = True) -> Step:
    """DeepSpeed-MoE: the MLPs of the blocks with experts are its layers, experts spread over all ranks, capacity and
    gates as `workload.MODEL` says, without random token selection. Its own factor of the balance loss is ours. bf16:
    its bf16 mode. `drop`: False pads to the most that any expert gets."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    from shoal.models.gpt import GeluMLP

    rank, size = _init_gloo()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model, shares = build_model(), _shares(case, rank, size)
    cfg = model.cfg
    assert cfg.moe is not None

    class Layer(nn.Module):
        """DeepSpeed's layer, returning what a block of ours expects."""

        def __init__(self) -> None:
            super().__init__()
            assert cfg.moe is not None
            self.inner = MoE(
                cfg.d_model,
                GeluMLP(cfg.d_model, cfg.moe.d_ff or cfg.ff, bias=False),
                num_experts=cfg.moe.experts,
                ep_size=size,
                k=cfg.moe.per_token,
                capacity_factor=cfg.moe.capacity_factor or 1.0,
                min_capacity=1,
                drop_tokens=drop,
                use_rts=False,
                top2_2nd_expert_sampling=False,
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y, balance, _ = self.inner(x)
            return y, torch.stack([balance.float(), balance.new_zeros((), dtype=torch.float32)])

    for place, block in enumerate(model.blocks):
        if cfg.has_experts(place):
            block.mlp = Layer()
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True),
        config={
            "train_micro_batch_size_per_gpu": case.batch // size,
            "zero_optimization": {"stage": 0},
            "bf16": {"enabled": precision == "bf16"},
            "steps_per_print": 1_000_000,
        },
    )

    def step() -> None:
        tokens, labels = next(shares)
        out = engine(tokens)
        engine.backward(mean_loss(out.logits, labels) + sum(out.losses.values()))
        engine.step()

    return step


def zero_redundancy(case: Case, precision: str) -> Step:
    """torch DDP with ZeroRedundancyOptimizer: optimizer state sharded by whole parameters. bf16: autocast over fp32
    weights."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rank, size = _init_gloo()
    shares, context = _shares(case, rank, size), _autocast(precision)
    model = nn.parallel.DistributedDataParallel(build_model(), gradient_as_bucket_view=True, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True)

    def step() -> None:
        _forward_backward(model, *next(shares), context)
        optimizer.step()
        optimizer.zero_grad()

    return step


def tensor_parallel(case: Case, precision: str, sequence: bool = False, pure: bool = False) -> Step:
    """torch's `parallelize_module` over all ranks, each of which has the whole batch: columns and rows as Megatron cuts
    them, the loss over sharded logits (`loss_parallel`). The rows of the fused qkv stand so that a rank's are those of
    its heads, whose number is set by hand. `sequence`: norms and residual sums over a rank's tokens
    (`SequenceParallel`). bf16: autocast over fp32 weights; `pure`: weights, gradients and AdamW's state in bf16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    from shoal.models import gpt

    vars(gpt)["_sum"] = torch.add  # what parallelize_module's layers give may not be changed in place
    _, size = _init_gloo()
    mesh, model, shares = init_device_mesh("cpu", (size,)), build_model(), _shares(case, 0, 1)
    model.to(torch.bfloat16 if pure else torch.float32)
    between = Shard(1) if sequence else Replicate()
    plan = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    whole = PrepareModuleInput(input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None))
    block_plan = {
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=between),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        plan["position_embedding"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=between)
        plan["norm"] = SequenceParallel()
        block_plan |= {
            "attention_norm": SequenceParallel(),
            "attention": whole,
            "mlp_norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        }
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan)
        attention: Any = block.attention
        attention.heads, attention.kv_heads = attention.heads // size, attention.kv_heads // size
    kinds = [
        [p for p in model.parameters() if isinstance(p, DTensor) is cut] for cut in (True, False)
    ]  # the kernel takes no mixture
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds if kind], lr=LEARNING_RATE, fused=True)
    context = nullcontext() if pure else _autocast(precision)

    def step() -> None:
        with loss_parallel():
            _forward_backward(model, *next(shares), context)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _ddp(case: Case, context: AbstractContextManager[object], dtype: torch.dtype = torch.float32) -> Step:
    rank, size = _init_gloo()
    shares = _shares(case, rank, size)
    model = nn.parallel.DistributedDataParallel(
        build_model().to(dtype), gradient_as_bucket_view=True, static_graph=True
    )
    optimizer = _adamw(model)

    def step() -> None:
        _forward_backward(model, *next(shares), context)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _init_gloo() -> tuple[int, int]:
    """Joins the ranks as torch programs do; returns (rank, number of ranks)."""
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def _require_finite(model: nn.Module) -> None:
    norm = nn.utils.get_total_norm(each.grad for each in model.parameters() if each.grad is not None)
    if not math.isfinite(norm):
        raise ValueError(f"the gradient norm is {float(norm)}")


def _leave_alone(model: nn.Module) -> None:
    """Does not look at the gradient."""


def _autocast(precision: str) -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def _shares(case: Case, rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return itertools.cycle(Tokens(case.sequence).shares(case.batch, rank, size))


def _forward_backward(
    model: nn.Module, tokens: Tensor, labels: Tensor, context: AbstractContextManager[object] | None = None
) -> None:
    with context or nullcontext():
        loss = mean_loss(model(tokens), labels)
    loss.backward()
