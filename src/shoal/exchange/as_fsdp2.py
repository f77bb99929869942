"""Shoal's codecs under torch's FSDP2 (`fully_shard`): gradients travel encoded and are summed in fp32.

    fully_shard(model) as_fsdp2("bytegrad", model)

FSDP keeps a shard of the sum, so the way back of Shoal's own exchange is not needed, and each value is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from shoal.comm import Group, Ledger
from shoal.comm.codecs import Codec, codec
from shoal.comm.torch_group import TorchGroup
from shoal.errors import UserError
from shoal.exchange.algorithm import Algorithm
from shoal.exchange.compressed import Compressed
from shoal.exchange.gradients_only import gradient_algorithm, refusal
from shoal.exchange.scatter_gather import sum_of_cut
from shoal.plan import Option


def as_fsdp2(algorithm: Option | Algorithm, model: nn.Module) -> Ledger:
    """Encodes the gradients of every module that `fully_shard` has sharded; returns the ledger of what is sent.

    - `algorithm`: fp16, bf16, bytegrad, or {name = "bytegrad", codec = ...}
    - `model`: contains the sharded modules

    All ranks call it, before the first backward pass. Under hybrid sharding (a 2-D mesh) it serves the reduction inside
    a shard group; the all-reduce across them stays FSDP's. Raises UserError for an algorithm that needs whole gradients
    on each rank, and for a model without sharded modules.
    """
    where = "FSDP2"
    chosen = gradient_algorithm(algorithm, where)
    if (reason := _needs_whole_gradients(chosen)) is not None:
        raise refusal(algorithm, where, reason, ["fp16", "bf16", "bytegrad"])
    assert isinstance(chosen, Compressed)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise UserError("the model has no sharded module: call fully_shard(model) first, then as_fsdp2")
    exchange = EncodedReduceScatter(codec(chosen.codec))
    for module in sharded:
        module.set_custom_reduce_scatter(exchange)
        module.set_force_sum_reduction_for_comms(True)  # FSDP divides the sum itself, by whatever factor it was given
    return exchange.ledger


def _needs_whole_gradients(chosen: Algorithm) -> str | None:
    if not isinstance(chosen, Compressed):
        return "FSDP sums shards, exactly by itself, and only a codec that works element by element fits into that"
    if chosen.error_feedback:
        return "error feedback keeps a residual as large as the unsharded gradients on each rank"
    return None


class EncodedReduceScatter(ReduceScatter):
    """Replaces FSDP's reduce-scatter. It runs in the order of FSDP's own collectives, on the same process group."""

    def __init__(self, codec: Codec) -> None:
        self.ledger = Ledger()
        self._codec = codec
        self._groups: dict[dist.ProcessGroup, Group] = {}

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise UserError(
                f"as_fsdp2 sums gradients, and was asked for {op}: leave set_force_sum_reduction_for_comms at True"
            )
        if group not in self._groups:
            self._groups[group] = Group.of(TorchGroup(group), "shards", self.ledger)
        reduce_scatter(output_tensor, input_tensor, self._groups[group], self._codec, "gradients")


def reduce_scatter(out: Tensor, flat: Tensor, group: Group, codec: Codec, purpose: str) -> None:
    """Fills `out` with this rank's cut of the sum of `flat` (size * out.numel()) over `group`, in fp32.

    Each addend is rounded by `codec`.
    """
    cuts = [slice(rank * out.numel(), (rank + 1) * out.numel()) for rank in range(group.size)]
    out.copy_(sum_of_cut(flat, cuts, group, codec, purpose))
