"""Which update of all pages in a directory is whole: one record for each of two generations, which take turns, renamed
into place when all that it speaks of is on the disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.errors import StorageError
from shoal.replace import sync

SLOTS = "ab"
"""Generations that are kept: they take turns."""


def slot_of(generation: int) -> str:
    """Returns where a generation lies, one of SLOTS."""
    return SLOTS[generation % len(SLOTS)]


@dataclass(frozen=True)
class Records:
    """The records in `directory`."""

    directory: Path

    def find(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yields what each record says, and its slot."""
        from safetensors import SafetensorError  # the engine runs where only torch is installed

        for slot in SLOTS:
            try:
                about, _ = self.read(slot)
            except (OSError, SafetensorError):
                continue
            yield about, slot

    def read(self, slot: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Reads a record, and the small tensors beside it."""
        from safetensors import safe_open

        with safe_open(self._path(slot), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return json.loads(file.metadata()["about"]), tensors

    def write(self, slot: str, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Writes a record (JSON) and small tensors beside it, in place of the one that is there: all or nothing. Raises
        StorageError."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = self._path(slot)
        fresh = path.with_name(f"{path.name}.new")
        try:
            save_file({name: each.contiguous() for name, each in tensors.items()}, fresh, {"about": json.dumps(about)})
            sync(fresh)
            os.replace(fresh, path)
            sync(path.parent)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"{path} cannot be written: {error}") from error

    def withdraw(self, slot: str) -> None:
        """Deletes a record, if there is one: what it speaks of is about to change."""
        path = self._path(slot)
        if path.exists():
            path.unlink()
            sync(path.parent)  # or a loss of power would bring it back

    def _path(self, slot: str) -> Path:
        return self.directory / f"generation.{slot}"


def committed(directory: Path) -> dict[str, Any] | None:
    """Reads what was committed last in `directory`, of whatever plan and model: what `Pager.commit` was given as
    `about`, and under "makes" what it is of. None if nothing is there."""
    found = [{**about["user"], "makes": about["makes"]} for about, _ in Records(directory).find()]
    return max(found, key=lambda each: int(each["step"]), default=None)
