"""Choice of what runs an optimizer over chunks: torch's own, one a chunk, flat storage, or a kernel of ours."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.chunks import Buffer
from shoal.errors import UserError, did_you_mean
from shoal.optim.fused import ChunkwiseOptimizer, FlatOptimizer, refusal
from shoal.optim.fused.chunkwise import own
from shoal.optim.fused.host_adam import HostAdam
from shoal.optim.fused.optimizer import OptimizerFactory
from shoal.optim.groups import is_fused, make_optimizer, small_groups

_NEARLY = 0.8  # as like as "beta" and "betas"
_OF_SCHEDULERS = "initial_lr"  # where those of torch go on from


def chunkwise(
    factory: OptimizerFactory,
    groups: list[dict[str, Any]],
    owned: Sequence[Buffer],
    parameters: Mapping[str, nn.Parameter],
) -> ChunkwiseOptimizer:
    """Makes one optimizer a chunk, where the state of all is not in memory together."""
    by_chunk = [[parameters[slot.name] for slot in each.slots] for each in owned]
    return ChunkwiseOptimizer(partial(make_optimizer, factory), groups, by_chunk)


def at_once(
    factory: OptimizerFactory,
    groups: list[dict[str, Any]],
    owned: Sequence[Buffer],
    parameters: Mapping[str, nn.Parameter],
) -> torch.optim.Optimizer:
    """Makes one optimizer for all: torch's fused kernel, else over flat storage where that gives the same bits."""
    optimizer = make_optimizer(factory, groups)
    if owned and not is_fused(optimizer):
        # a stand-in for each group's parameters: every owner decides alike, also one that has none of a group
        stand_ins = small_groups(groups, owned[0].master_like.new_zeros(2, 2))
        if refusal(factory, stand_ins) is None:
            return FlatOptimizer(factory, groups, owned, parameters)
    return optimizer


def check_options(given: Sequence[Mapping[str, Any]], known: Mapping[str, Any], kind: str) -> None:
    """Raises UserError for an option of a group that is nearly one of those that an optimizer of that `kind` knows, and
    warns of others, since the optimizer heeds neither."""
    for key in dict.fromkeys(key for options in given for key in options):
        if key in known or key == _OF_SCHEDULERS:
            continue
        said = f'param_groups gives "{key}", which is no option of {kind} ({", ".join(known)})'
        if get_close_matches(key.lower(), known, 1, _NEARLY):
            raise UserError(f"{said}.{did_you_mean(key, list(known))}")
        warnings.warn(
            f"{said}: it changes nothing, unless code of yours reads it in engine.optimizer.torch.param_groups",
            stacklevel=2,
        )


def on_host(
    optimizer: torch.optim.Optimizer, owned: Sequence[Buffer], parameters: Mapping[str, nn.Parameter]
) -> HostAdam | None:
    """Our own kernel for the host, where it does what torch's fused one would."""
    groups_alike = all(is_fused(each) and HostAdam.takes(each, []) for each in every_one_of(optimizer))
    if not groups_alike or not HostAdam.takes(one_of(optimizer), owned):
        return None
    return HostAdam(optimizer, parameters)


def with_own_options(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer, whose groups have tensors of their own where options are tensors: a schedule would write
    into those of the factory, by which other optimizers are made, and those of other groups."""
    for group in optimizer.param_groups:
        group.update({key: own(value) for key, value in group.items()})
    return optimizer


def one_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer, or the first of those that run chunk by chunk, which is like all of them but for the
    options of their groups."""
    return optimizer.first if isinstance(optimizer, ChunkwiseOptimizer) else optimizer


def every_one_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Returns the optimizer, or those that run chunk by chunk, each with the options of one group."""
    return optimizer.every if isinstance(optimizer, ChunkwiseOptimizer) else [optimizer]


def scales(optimizer: torch.optim.Optimizer, gradients: Iterable[Tensor]) -> bool:
    """Whether the optimizer divides `gradients` by a scale, and skips an update, as it goes. The scale is fp32."""
    fp32 = all(gradient.dtype == torch.float32 for gradient in gradients)
    able = (is_fused(each) and getattr(each, "_step_supports_amp_scaling", False) for each in every_one_of(optimizer))
    return fp32 and all(able)


def beside_masters(owned: Iterable[Buffer], *values: Tensor | None) -> list[Tensor | None]:
    """Brings `values` to the host if masters are there, and so waits for the gradients too, which left the device
    before: torch's fused kernels would read all of them at once."""
    there = any(each.master_like.is_cpu for each in owned)
    return [value.cpu() if there and value is not None else value for value in values]


def by_rows(gradient: Tensor, rows: Tensor | None) -> Tensor:
    """The `gradient` of a matrix as SparseAdam takes it: of `rows`, or of those that are not zero where None."""
    rows = gradient.flatten(1).any(1).nonzero().flatten() if rows is None else rows.unique()
    return torch.sparse_coo_tensor(rows[None], gradient[rows], gradient.shape, is_coalesced=True)


def kernel_of(optimizer: torch.optim.Optimizer, host: HostAdam | None) -> str:
    """Names what runs the updates of `optimizer`, those on the host by `host`."""
    if host is not None:
        return "Shoal's kernel for the host"
    if is_fused(one_of(optimizer)):
        return "torch's fused kernel"
    flat = isinstance(optimizer, FlatOptimizer)
    return "torch's operations, over flat storage" if flat else "torch's operations, over each parameter"
