"""No exchange: each replica trains alone. For measuring what communication costs; replicas drift apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.chunks import Chunk
from shoal.comm import Group


@dataclass(frozen=True)
class NoExchange:
    """Leaves the gradients of this rank's own samples as they are."""

    chunk_bytes: int = 25 * 2**20
    keeps_replicas_equal: ClassVar[bool] = False

    def run(self, chunk: Chunk, group: Group) -> None:
        """Does nothing."""
