"""Where state is read from: a checkpoint on disk, or (see handover) the memory of the ranks that hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from shoal.checkpoint.extra import read_extra
from shoal.checkpoint.pieces import Want
from shoal.checkpoint.reader import load, tensor_shapes


class Source(Protocol):
    """The state of a run as named global tensors and JSON (see state), to be read under any plan.

    `name`: for messages.
    """

    @property
    def name(self) -> str: ...

    @property
    def extra(self) -> Mapping[str, Any]:
        """JSON state of the engine."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the global shapes of the tensors, by name."""

    def load(self, wants: Sequence[Want]) -> None:
        """Fills the wants of this rank, cast to their dtypes. Raises CheckpointError for what is not there."""


@dataclass(frozen=True)
class OnDisk:
    """The checkpoint at `path`."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def extra(self) -> Mapping[str, Any]:
        return read_extra(self.path)

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return tensor_shapes(self.path)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def load(self, wants: Sequence[Want]) -> None:
        load(self.path, wants)
