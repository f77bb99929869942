"""A disk on which nothing lies: pages of tensors without memory go nowhere and come from nowhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.optim.tiers.disk import SECTOR, Disk, Stored, sectors, within
from shoal.optim.tiers.generations import Records


class MadeUpDisk(Disk):
    """A disk of which a rank may take `capacity` bytes; `directory` is never looked at."""

    def __init__(self, directory: Path, capacity: int | None = None) -> None:
        self.directory, self.capacity, self.used = directory, capacity, 0

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(max(SECTOR, sectors(nbytes)), dtype=torch.uint8)

    first = buffer

    @property
    def records(self) -> Records:
        return _NoRecords(self.directory)

    def files(self, sizes: Mapping[str, int]) -> Mapping[str, Stored]:
        self.used = within(self.capacity, sizes)
        return {name: _Nothing(self.directory / name, size) for name, size in sizes.items()}

    def keeps_all(self, sizes: Mapping[str, int]) -> bool:
        return True

    def close(self) -> None:
        pass


class _Nothing(Stored):
    """A file that is not there."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size

    def read(self, into: Tensor) -> list[Future[None]]:
        return []

    def write(self, data: Tensor) -> list[Future[None]]:
        return []

    def sync(self) -> None:
        pass


class _NoRecords(Records):
    """Records that nobody has written."""

    def find(self) -> Iterator[tuple[dict[str, Any], str]]:
        return iter(())

    def write(self, slot: str, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        pass

    def withdraw(self, slot: str) -> None:
        pass
