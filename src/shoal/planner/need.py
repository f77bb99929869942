"""What a rank needs of memory, in rows, and the most of a tier at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TIERS = ("device", "host", "disk")
"""From the fastest to the largest. On a CPU device and host are the same memory."""
Phase = Literal["always", "backward", "update"]


@dataclass(frozen=True)
class Row:
    """`nbytes` of a rank in one tier, always or in one phase of a step only. `sharers`: ranks of the host that have it
    in common."""

    role: str
    tier: str
    nbytes: int
    phase: Phase = "always"
    sharers: int = 1


@dataclass(frozen=True)
class MemoryNeed:
    """The rows of a rank. `least`: with how few bytes the tier of `plan.memory.device` would do for what moves and what
    backward keeps, None where the plan sets no such tier; `unlimited`: what it holds at most of that where no limit has
    weights go, None where one is set."""

    rows: tuple[Row, ...]
    least: int | None
    unlimited: int | None = None

    def of(self, role: str) -> int:
        """Bytes of a role, of all tiers."""
        return sum(row.nbytes for row in self.rows if row.role == role)

    def total(self, tier: str, ranks: int = 1) -> int:
        """The most that `ranks` of one host need of a tier at a time: what is always there, and the dearer phase. Of a
        budget's device the smallest that would do; without a limit of it weights stay that have come."""
        return self._total(tier, ranks, self.least if self.unlimited is None else self.unlimited)

    def smallest(self) -> int:
        """What the device holds at most under the smallest budget that would do."""
        return self._total("device", 1, self.least)

    def _total(self, tier: str, ranks: int, moved: int | None) -> int:
        """`total` with `moved` bytes of the device for what moves and what backward keeps."""

        def nbytes(phase: Phase) -> int:
            mine = [row for row in self.rows if row.tier == tier and row.phase == phase]
            return sum(row.nbytes * max(1, ranks // row.sharers) for row in mine)

        backward = nbytes("backward")
        if tier == "device" and moved is not None:
            backward = ranks * moved
        return nbytes("always") + max(backward, nbytes("update"))
