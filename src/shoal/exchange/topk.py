"""Top-k sparsification with residuals (Deep Gradient Compression, https://arxiv.org/abs/1712.01887)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.chunks import Chunk
from shoal.comm.codecs import ErrorFeedback, codec
from shoal.exchange.algorithm import Algorithm, Replica, State, by_parameter
from shoal.exchange.kept import Kept, parts_of
from shoal.exchange.sends import CODED, TWICE, Sends, coded
from shoal.plan import Option


@dataclass
class TopK(Algorithm):
    """Sends the share `ratio` of entries that are largest in magnitude to all others; error feedback keeps the rest."""

    ratio: float = 0.01
    chunk_bytes: int | None = 16 * 2**20

    def sends(self, ranks: int, itemsize: int, side: float) -> Sends:
        share = coded({"name": "topk", "ratio": self.ratio}, itemsize)
        return Sends(share * ranks / 2, 2 * CODED, handed=TWICE)  # everybody gets what everybody sends

    def __post_init__(self) -> None:
        chosen: Option = {"name": "topk", "ratio": self.ratio}
        self._codec = codec(chosen)

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        self._index = {chunk.index: index for index, chunk in enumerate(replica.chunks)}
        self._residual = [chunk.like_gradient(torch.float32) for chunk in replica.chunks]
        self._kept = Kept(self._residual, [parts_of(chunk) for chunk in replica.chunks])

    @property
    def keeps_back(self) -> bool:
        return True

    def begin(self, step: int) -> None:
        self._kept.drop()

    def reduce(self, chunk: Chunk, own_mean: Tensor) -> None:
        group, flat = self.replica.group, chunk.gradient
        if group.size == 1:
            return
        residual = self._kept.take(self._index[chunk.index])
        sent = flat.new_empty(self._codec.encoded_bytes(flat.numel()), dtype=torch.uint8)
        ErrorFeedback.over(self._codec, residual).encode(flat, sent)
        gathered = sent.new_empty(sent.numel() * group.size)
        group.all_gather(gathered, sent, purpose=f"gradients {chunk.index}")
        flat.zero_()
        for data in gathered.split(sent.numel()):
            self._codec.decode_add(data, flat)

    def renew(self, to_mean: Tensor, skip: Tensor | None, untouched: Sequence[str]) -> None:
        self._kept.commit(to_mean, skip, untouched)

    def state(self) -> dict[str, State]:
        self._kept.drop()
        return {"residual": State(by_parameter(self.replica.chunks, self._residual), "split")}
