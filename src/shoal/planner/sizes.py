"""What a rank holds of a piece of a model, or of all pieces of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

POLICIES = ("none", "selective", "full")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a piece, or of all pieces of a stage, on one rank: elements of parameters (all, trained, of
    experts), and bytes that a row keeps for backward by recompute policy, and that travel to it. `largest`: the most
    that one piece saves without recompute, `again`: that one block does; `in_use`: elements of the largest part,
    `tensor`: of the largest parameter; `calls`: operations of a forward; `tensors`: parameters that are trained;
    `waiting`: trained elements of the largest stage of a rank but its last."""

    weights: float
    trained: float
    experts: float
    saved: dict[str, float]
    boundary: float
    largest: float
    again: float
    in_use: float
    tensor: float
    calls: float
    tensors: int
    waiting: float = 0.0

    def frees(self, policy: str) -> float:
        """Bytes of a row that recompute frees."""
        return self.saved["none"] - self.saved[policy]


def together(sizes: Sequence[tuple[Sizes, int]]) -> Sizes:
    """The sizes of so many of each, of which the first is called first."""
    summed = ("weights", "trained", "experts", "calls", "tensors")
    total = {name: sum(getattr(each, name) * number for each, number in sizes) for name in summed}
    most = {name: max(getattr(each, name) for each, _ in sizes) for name in ("largest", "again", "in_use", "tensor")}
    saved = {policy: sum(each.saved[policy] * number for each, number in sizes) for policy in POLICIES}
    return Sizes(saved=saved, boundary=sizes[0][0].boundary, **total, **most)
