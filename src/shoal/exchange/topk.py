"""Only the largest gradients travel; the rest waits in the residual (Deep Gradient Compression, https://arxiv.org/abs/1712.01887)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.chunks import Chunk
from shoal.comm.codecs import ErrorFeedback, codec
from shoal.exchange.algorithm import Algorithm, Replica, State, by_parameter
from shoal.plan import Option


@dataclass
class TopK(Algorithm):
    """Each rank sends the `ratio` of its entries that are largest in magnitude to all others; error feedback keeps the rest."""

    ratio: float = 0.01
    chunk_bytes: int | None = 16 * 2**20

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        chosen: Option = {"name": "topk", "ratio": self.ratio}
        self._codec = codec(chosen)
        self._place = {chunk.index: place for place, chunk in enumerate(replica.chunks)}
        self._residual = [chunk.like_gradient(torch.float32) for chunk in replica.chunks]

    def reduce(self, chunk: Chunk, own_mean: Tensor) -> None:
        group, flat, residual = self.replica.group, chunk.gradient, self._residual[self._place[chunk.index]]
        if group.size == 1:
            return
        sent = flat.new_empty(self._codec.encoded_bytes(flat.numel()), dtype=torch.uint8)
        ErrorFeedback.over(self._codec, residual).encode(flat, sent)
        gathered = sent.new_empty(sent.numel() * group.size)
        group.all_gather(gathered, sent, purpose=f"gradients {chunk.index}")
        flat.zero_()
        for data in gathered.split(sent.numel()):
            self._codec.decode_add(data, flat)

    def state(self) -> dict[str, State]:
        return {"residual": State(by_parameter(self.replica.chunks, self._residual), "split")}
