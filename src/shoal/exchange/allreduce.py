"""All-reduce: every replica gets the exact sum of all gradients in each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.exchange.algorithm import Algorithm


@dataclass
class AllReduce(Algorithm):
    """All-reduces each chunk in the gradient's own precision."""

    reduces_in_place: ClassVar[bool] = True
