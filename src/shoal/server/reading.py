"""What clients read of a table whose gradients come with those of a job's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.server.follower import Follower
from shoal.server.keeping import NotDone
from shoal.server.ledger import Ledger
from shoal.server.messages import Push, Taken, Work
from shoal.server.part import Part
from shoal.server.served_table import ServedTable


class Reading:
    """`values` as a part of their own, from which rows are pulled at the version of `part`; it takes no pushes."""

    def __init__(self, part: Part | Follower, values: ServedTable) -> None:
        self.values, self._part = values, part

    @property
    def ledger(self) -> Ledger:
        return self._part.ledger

    def join(self, rank: int, incarnation: str) -> None:
        """Does nothing: the weights know their clients."""

    def leave(self, rank: int, lost: bool) -> None:
        """Does nothing: the weights know their clients."""

    def pull(
        self, rank: int, asked: Sequence[Tensor], seconds: float, into: list[Tensor], device: torch.device
    ) -> tuple[int, list[Tensor]]:
        """Returns version and values of rows; nobody waits, since who reads them has pulled the weights."""
        if why := self.values.wrong(asked[0]):
            raise NotDone(f"client {rank} asks for {why}")
        return self._part.read(lambda: [self.values.read(asked[0])], seconds)

    def push(self, rank: int, incarnation: str, push: Push, raw: list[Tensor]) -> Taken:
        raise NotDone(f"the gradients of {self.values.name} come with those of the weights")

    def deal(self, rank: int, seconds: float, found: Mapping[str, Any]) -> Work:
        raise NotDone("the weights have the work of a job")

    def end_well(self) -> None:
        """Does nothing: a checkpoint of the weights has these rows, too."""

    def close(self) -> None:
        """Does nothing: the weights are closed."""
