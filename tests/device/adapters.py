"""Loops of torch with Shoal's exchanges in them, on a device or on the CPU: each returns numbers to compare."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shoal import as_ddp_hook, as_fsdp2
from shoal.comm import World
from tests.exchange.torch_loops import network, samples

STEPS = 5
SMALL = 0.002
"""MiB a bucket: several of them."""


def ddp_hook(exchange: Any, world: World, folder: str) -> list[float]:
    with in_group(world, folder):
        ddp = DistributedDataParallel(network().to(world.device), bucket_cap_mb=SMALL)
        ddp.register_comm_hook(*as_ddp_hook(exchange, ddp))
        return trained(ddp, world)


def scaled_ddp_hook(exchange: Any, world: World, folder: str) -> list[float]:
    """Under a loss scale, with a step that overflows: what the algorithm keeps back is not of that one."""
    with in_group(world, folder):
        ddp = DistributedDataParallel(network().to(world.device), bucket_cap_mb=SMALL)
        scales, scale = iter((4.0, 8.0, 2.0, 4.0, 8.0)), 1.0
        ddp_state, hook = as_ddp_hook(exchange, ddp, loss_scale=lambda: scale)
        ddp.register_comm_hook(ddp_state, hook)

        def backward(loss: Tensor, update: Callable[[], None]) -> None:
            nonlocal scale
            scale = next(scales)
            overflows = ddp_state.step == 1
            (loss * (math.inf if overflows else scale)).backward()
            if not overflows:
                for parameter in ddp.parameters():
                    assert parameter.grad is not None
                    parameter.grad.div_(scale)
                update()

        return trained(ddp, world, backward)


def fsdp2(exchange: str, world: World, folder: str) -> list[float]:
    with in_group(world, folder):
        mesh = init_device_mesh(world.device.type, (world.size,))
        model = network().to(world.device)
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        as_fsdp2(exchange, model)
        return trained(model, world)


def at_once(loss: Tensor, update: Callable[[], None]) -> None:
    loss.backward()
    update()


def trained(
    model: nn.Module, world: World, backward: Callable[[Tensor, Callable[[], None]], None] = at_once
) -> list[float]:
    """Losses, and the norms of the weights, read when all is over: the host waits for nothing before."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(STEPS):
        x, y = (part.to(world.device) for part in samples(world.rank, step))
        loss = (model(x) - y).square().mean()
        backward(loss, optimizer.step)
        # Not to None: FSDP gives gradients back to the stream that reduced them, which waits for this one only when it
        # reduces next.
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.detach())
    whole = [part.full_tensor() if isinstance(part, DTensor) else part for part in model.parameters()]
    return [*torch.stack(losses).tolist(), *(float(part.detach().norm()) for part in whole)]


@contextmanager
def in_group(world: World, folder: str) -> Iterator[None]:
    """Inside, torch has a process group over the ranks, of the backend that it registers for their device."""
    backend = dist.get_default_backend_for_device(world.device)
    store = dist.FileStore(f"{folder}/torch-{backend}", world.size)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()
