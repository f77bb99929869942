"""Hierarchical all-reduce: sum inside each host, then across hosts (the only use of the network), then spread.

Every rank takes part in it with its own cut, so that all of a host's links work (as in Horovod; Bagua's leaders use
one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.chunks import Chunk
from shoal.comm.codecs import codec
from shoal.comm.connect import this_host
from shoal.errors import UserError
from shoal.exchange.algorithm import USUAL_CHUNK, Algorithm, Replica
from shoal.exchange.scatter_gather import scatter_gather
from shoal.exchange.sends import CODED, TWICE, Sends, coded
from shoal.plan import Option


@dataclass
class Hierarchical(Algorithm):
    """Sums exactly inside a host, and across hosts through `codec`.

    `ranks_per_host`: consecutive ranks that count as a host; by default those that share one. Hosts must have equal
    numbers of ranks.
    """

    codec: Option = "fp32"
    ranks_per_host: int | None = None

    def __post_init__(self) -> None:
        self._codec = codec(self.codec)
        if self.chunk_bytes is None and not self._codec.lossless:
            self.chunk_bytes = USUAL_CHUNK

    def sends(self, ranks: int, itemsize: int, side: float) -> Sends:
        if self._codec.lossless:
            return Sends(handed=TWICE + 1 / (self.ranks_per_host or ranks))
        return Sends(coded(self.codec, itemsize), CODED, inside_hosts=True, handed=TWICE)

    def check_ranks(self, ranks: int) -> None:
        if (each := self.ranks_per_host) is not None:
            _check_even([min(each, ranks - first) for first in range(0, ranks, each)])

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        group = replica.group
        if self.ranks_per_host is None:
            names = group.all_gather_object(this_host())
        else:
            names = [str(rank // self.ranks_per_host) for rank in range(group.size)]
        hosts = [[rank for rank in range(group.size) if names[rank] == name] for name in dict.fromkeys(names)]
        _check_even([len(ranks) for ranks in hosts])
        mine = next(ranks for ranks in hosts if group.rank in ranks)
        self._inside = replica.among("inside", mine)
        self._across = replica.among("across", [ranks[mine.index(group.rank)] for ranks in hosts])

    @torch.no_grad()
    def reduce(self, chunk: Chunk, own_mean: Tensor) -> None:
        purpose, inside, flat = f"gradients {chunk.index}", self._inside, chunk.gradient
        each = -(-flat.numel() // inside.size)
        missing = each * inside.size - flat.numel()
        padded = torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
        cut = flat.new_empty(each)
        inside.reduce_scatter(cut, padded, purpose=purpose)
        if self._codec.lossless:
            self._across.all_reduce(cut, purpose=purpose)
        else:
            scatter_gather(cut, self._across, self._codec, purpose)
        inside.all_gather(padded, cut, purpose=purpose)
        if padded is not flat:
            flat.copy_(padded[: flat.numel()])
        if not self._codec.lossless:
            chunk.clear_padding(flat)


def _check_even(hosts: Sequence[int]) -> None:
    """Raises UserError where hosts have different numbers of ranks."""
    if len(set(hosts)) > 1:
        raise UserError(
            f'plan.exchange = "hierarchical": hosts have {", ".join(map(str, hosts))} of the ranks; start as many on '
            'each, or take "allreduce"'
        )
