"""All-reduce: every replica gets the sum of all gradients, exactly, each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.chunks import Chunk
from shoal.exchange.algorithm import Algorithm


@dataclass
class AllReduce(Algorithm):
    """One all-reduce a chunk, in the gradient's own precision."""

    chunk_bytes: int = 25 * 2**20
    reduces_in_place: ClassVar[bool] = True

    def reduce(self, chunk: Chunk, own_mean: Tensor) -> None:
        self.replica.group.all_reduce(chunk.gradient, purpose=f"gradients {chunk.index}")
