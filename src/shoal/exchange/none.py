"""No exchange: each replica trains alone and drifts. It measures what communication costs."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.exchange.algorithm import USUAL_CHUNK, TrainsAlone
from shoal.exchange.sends import Sends


@dataclass
class NoExchange(TrainsAlone):
    """Leaves the gradients of this rank's own samples as they are, and sends nothing at all."""

    chunk_bytes: int | None = USUAL_CHUNK

    def sends(self, ranks: int, itemsize: int, side: float) -> Sends:
        return Sends(0.0)
