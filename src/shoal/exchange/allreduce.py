"""All-reduce: every replica gets the exact sum of all gradients in each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.chunks import Chunk
from shoal.exchange.algorithm import Algorithm


@dataclass
class AllReduce(Algorithm):
    """All-reduces each chunk in the gradient's own precision."""

    reduces_in_place: ClassVar[bool] = True

    def reduce_part(self, chunk: Chunk, own_mean: Tensor) -> None:
        chunk.reduce_scatter(f"gradients {chunk.index}")

    def reduce_sum(self, chunk: Chunk, own: Tensor) -> None:
        """Copies of a chunk add up once a step: hybrid sharding, and stages that share weights, which would wait for
        each other in each microbatch."""
        chunk.add_copies(own, f"gradients {chunk.index}")
