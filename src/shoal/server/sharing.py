"""What several servers of the Python API keep together in one directory, so that others may go on from it.

    weights-0-of-2/  weights-1-of-2/    what each server keeps of the weights: checkpoints and a journal
    weights/                            the checkpoints of the weights that all have written; of one server its own
    table-emb-0-of-2/ ...               what each keeps of a table

Another number of servers goes on from the newest checkpoint of all, once no journal has gradients beside it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from shoal.checkpoint.directory import clean, completed, step_path
from shoal.checkpoint.manifest import read_manifest
from shoal.checkpoint.merge import merge
from shoal.errors import CheckpointError, UserError
from shoal.server.journal import has_pushes

KEPT = 2
"""Checkpoints that are kept."""
_PARTS = re.compile(r"-(\d+)-of-(\d+)")


@dataclass(frozen=True)
class Sharing:
    """The place of server `index` of `count` that have the part `name` in `directory`. `merged`: whether checkpoints of
    all are made one."""

    directory: Path
    name: str
    index: int
    count: int
    merged: bool

    def folder(self, index: int, count: int) -> Path:
        """Returns where server `index` of `count` keeps its share."""
        return self.directory / (self.name if count == 1 else f"{self.name}-{index}-of-{count}")

    @property
    def own(self) -> Path:
        return self.folder(self.index, self.count)

    @property
    def told(self) -> dict[str, Any]:
        """What a checkpoint says of it; nothing of one server."""
        return {} if self.count == 1 else {"share": [self.index, self.count]}

    def publish(self, version: int) -> None:
        """Makes one checkpoint of what all servers have written of a version, where this is the last of them."""
        if self.count == 1 or not self.merged:
            return
        parts = [step_path(self.folder(index, self.count), version) for index in range(self.count)]
        with FileLock(self.directory / f"{self.name}.lock"):
            if all(part.exists() for part in parts):
                whole = self.directory / self.name
                try:
                    clean(whole)  # of a server that was killed in the middle
                    merge(parts, step_path(whole, version), KEPT)
                except (CheckpointError, OSError) as error:  # each has its own, and the next one may succeed
                    warnings.warn(str(error), stacklevel=2)

    def others(self) -> list[Path]:
        """Returns the newest checkpoints of other servers, one of each, from which to go on: none where this server's
        own is as new, or where there are none. Raises UserError where gradients are in journals beside them."""
        found = {count: self._newest(count) for count in self._counts()}
        ours = found.pop(self.count, {})
        count, versions = max(found.items(), key=lambda each: max(each[1].values()), default=(0, {}))
        newest = max(versions.values(), default=0)
        if self.index not in ours and max(ours.values(), default=0) > newest:
            raise UserError(
                f"the other servers have {self.name} in {self.directory}, and {self.own.name} is missing: bring it back"
            )
        if not found or newest <= ours.get(self.index, -1):
            return []
        folders = [self.folder(index, count) for index in range(count)]
        if len(versions) < count or min(versions.values()) < newest or any(map(_has_pushes, folders)):
            raise UserError(
                f"{count} servers have kept {self.name} in {self.directory}, with gradients that no checkpoint of all "
                f"has: start these {count} again and close them; then any number goes on"
            )
        return [step_path(folder, newest) for folder in folders]

    def _counts(self) -> set[int]:
        """Returns of how many servers there are shares."""
        found = {1} if self._newest(1) else set[int]()
        for each in self.directory.iterdir() if self.directory.exists() else ():
            if match := _PARTS.fullmatch(each.name.removeprefix(self.name)):
                found.add(int(match[2]))
        return {count for count in found if self._newest(count)}

    def _newest(self, count: int) -> dict[int, int]:
        """Returns the version of the newest checkpoint of each of `count` servers that has one."""
        found = {}
        for index in range(count):
            for version, path in completed(self.folder(index, count))[:1]:
                if count > 1 or "share" not in state_of(path):
                    found[index] = version
        return found


def state_of(path: Path) -> Mapping[str, Any]:
    """Returns the accounts in a checkpoint of a server's; empty where there are none."""
    extra = read_manifest(path).extra
    state = extra.get("server") or (extra.get("user") or {}).get("server") or {}
    return dict(state)


def _has_pushes(folder: Path) -> bool:
    _, path = completed(folder)[0]
    state = state_of(path)
    return has_pushes(folder / f"journal-{state['version']:08d}-{state['journal']}")


def shared_checkpoint(parts: Sequence[Path]) -> Path:
    """Returns the checkpoint that has been made of all `parts`; the only one where there is one."""
    if len(parts) == 1:
        return parts[0]
    folder = parts[0].parent
    name = _PARTS.sub("", folder.name)
    path = folder.parent / name / parts[0].name
    with FileLock(folder.parent / f"{name}.lock"):
        if not path.exists():
            merge(parts, path, keep=len(parts))
    return path
