"""No exchange: each replica trains alone. For measuring what communication costs; replicas drift apart."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.exchange.algorithm import Algorithm, Holds


@dataclass
class NoExchange(Algorithm):
    """Leaves the gradients of this rank's own samples as they are, and sends nothing at all."""

    def holds(self, step: int) -> Holds:
        return Holds.ALONE

    def drifts(self, step: int) -> bool:
        return step > 0
