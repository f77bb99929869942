"""Ranks with a process group of torch's, and something small to train on them: for the tests of the adapters."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm import World
from tests.pool import TIMEOUT, run_ranks

STEPS = 20


def ranks(
    fn: Callable[..., Any], size: int, *args: Any, backend: str = "gloo", timeout: float = TIMEOUT, **options: Any
) -> list[Any]:
    """Calls `fn(rank, ...)` on `size` ranks of a process group."""
    return run_ranks(_in_process_group, size, fn, backend, args, options, timeout=timeout)


def _in_process_group(
    world: World, fn: Callable[..., Any], backend: str, args: Sequence[Any], options: dict[str, Any]
) -> Any:
    torch.set_num_threads(1)
    _meet(world, backend)
    try:
        return fn(world.rank, *args, **options)
    finally:  # once `fn` has let go of its model: torch can hang where one outlives its process group
        gc.collect()
        dist.destroy_process_group()


def _meet(world: World, backend: str) -> None:
    """Makes the process group. Gloo's ranks, which all connect to all, may not on a machine that has no time for them:
    then they all try once more."""
    for attempt in ("first", "second"):
        store, failure = dist.PrefixStore(f"adapters, {attempt}", world.store), None
        try:
            dist.init_process_group(
                backend, store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=30)
            )
        except RuntimeError as error:
            failure = error
        failed = torch.tensor(float(failure is not None))
        if not world.everyone.all_reduce(failed, "max", purpose="test"):
            return
        if dist.is_initialized():
            dist.destroy_process_group()
    raise failure or ConnectionError("another rank did not come to the process group, twice")


def network() -> nn.Sequential:
    torch.manual_seed(3)
    widths = [12, 32, 32, 32, 4]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def samples(rank: int, step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1000 * rank + step))
    return x, torch.tanh(x @ torch.randn(12, 4, generator=torch.Generator().manual_seed(7)))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = samples(rank, step)
    return nn.functional.mse_loss(model(x), y)


def evaluate(model: nn.Module) -> float:
    with torch.no_grad():
        return float(loss_of(model, 99, 0))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])
