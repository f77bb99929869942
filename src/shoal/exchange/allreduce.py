"""All-reduce: every replica gets the sum of all gradients, exactly, each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.chunks import Chunk
from shoal.comm import Group


@dataclass(frozen=True)
class AllReduce:
    """One all-reduce a chunk, in the gradient's own precision."""

    chunk_bytes: int = 25 * 2**20
    keeps_replicas_equal: ClassVar[bool] = True

    def run(self, chunk: Chunk, group: Group) -> None:
        """Sums `chunk.grad` over `group`, in place."""
        assert chunk.grad is not None
        group.all_reduce(chunk.grad, purpose=f"gradients {chunk.index}")
