"""Finds the newest sound checkpoint, and reads boxes from one, however it was cut when it was saved."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from shoal.checkpoint import directory as names
from shoal.checkpoint.index import read_index
from shoal.checkpoint.manifest import read_manifest
from shoal.checkpoint.pieces import Want
from shoal.checkpoint.verify import is_known_sound, verify
from shoal.comm import Group
from shoal.errors import CheckpointError
from shoal.parallel.layout import Box, intersect

_UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    pickle.UnpicklingError,
)
"""Errors that torch raises for a damaged file."""


def newest(directory: Path | str, on_damage: Callable[[Path, str], None]) -> Path | None:
    """Returns the newest checkpoint of the directory whose every byte is as it was saved; None if there is none.

    Calls `on_damage(path, reason)` for each newer one that is damaged or unfinished. It reads a whole checkpoint, so
    one rank calls it and tells the others.
    """
    directory = Path(directory)
    partial = [(step, path, "the save did not finish") for step, path in names.unfinished(directory)]
    candidates = [(step, path, "") for step, path in names.completed(directory)]
    for _, path, reason in sorted(partial + candidates, key=lambda entry: entry[0], reverse=True):
        reason = reason or "; ".join(verify(path)[:3])
        if not reason:
            return path
        on_damage(path, reason)
    return None


def checkpoint_at(path: Path, group: Group) -> Path:
    """Returns `path` where that is a checkpoint, else the newest sound one in it (see `newest_of`)."""
    return path if names.is_checkpoint(path) else newest_of(path, group)


def newest_of(directory: Path, group: Group) -> Path:
    """Returns the newest sound checkpoint, found by the first rank of `group`, which warns of damaged ones. A
    collective call. Raises CheckpointError, on all ranks, if there is none."""
    found: Path | None = None
    damaged: list[str] = []
    if group.rank == 0:
        found = newest(directory, lambda bad, why: damaged.append(f"{bad.name}: {why}"))
    found, damaged = group.broadcast_object((found, damaged))
    told = "; ".join(damaged)
    if found is None:
        raise CheckpointError(f"no checkpoint to load in {directory}" + (f" (damaged: {told})" if damaged else ""))
    if damaged and group.rank == 0:
        warnings.warn(f"damaged checkpoints passed over, {found.name} is used: {told}", stacklevel=4)
    return found


def require_sound(path: Path, group: Group) -> None:
    """Raises CheckpointError, on all ranks of `group` alike, if the checkpoint is damaged.

    The first rank reads every byte, unless it has done so already and no file was written since.
    """
    found: list[str] = []
    if group.rank == 0 and not is_known_sound(path):
        found = verify(path)
    if found := group.broadcast_object(found):
        raise CheckpointError(
            f"the checkpoint {path} is damaged: {'; '.join(found[:3])}. Bring back a copy, or load the directory "
            f"{path.parent}: that takes the newest one that is whole"
        )


def tensor_names(path: Path | str) -> list[str]:
    """Returns the names of the tensors in the checkpoint, sorted."""
    return sorted(tensor_shapes(path))


def tensor_shapes(path: Path | str) -> dict[str, tuple[int, ...]]:
    """Returns the global shapes of the tensors in the checkpoint, by name."""
    return {name: tuple(entry.size) for name, entry in _tensors(read_index(Path(path))).items()}


def load(path: Path | str, wants: Sequence[Want]) -> dict[str, Any]:
    """Fills the wants of this rank and returns the JSON state; reads only the saved boxes that a want overlaps.

    Values are cast to the dtype of `into`. Raises CheckpointError naming the tensor if it is not in the checkpoint, has
    another global shape, or is not wholly covered; nothing has been written into any want then. Contents are not
    checked (see `newest`, `verify`), but they cannot run code: see `index`, and torch's `weights_only`.
    """
    path = Path(path)
    extra = dict(read_manifest(path).extra)
    metadata = read_index(path)
    tensors = _tensors(metadata)
    _check_names(path, wants, tensors)
    items = [item for number, want in enumerate(wants) for item in _read_items(path, number, want, tensors[want.name])]
    # In the order of the files, so that the disk reads sequentially.
    items.sort(
        key=lambda item: (
            metadata.storage_data[item.storage_index].relative_path,
            metadata.storage_data[item.storage_index].offset,
        )
    )
    reader = FileSystemReader(path)
    reader.set_up_storage_reader(metadata, True)
    try:
        reader.read_data(LoadPlan(items), _Into(wants)).wait()
    except _UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be read: {error}; `shoal ckpt verify` names its damaged files") from error
    return extra


def _tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    return {
        name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }


def _check_names(path: Path, wants: Sequence[Want], tensors: dict[str, TensorStorageMetadata]) -> None:
    """Raises CheckpointError for missing tensors; it names unused ones too, since a renamed tensor is both."""
    missing = sorted({want.name for want in wants} - tensors.keys())
    if missing:
        unused = sorted(tensors.keys() - {want.name for want in wants})
        raise CheckpointError(
            f"{path} does not hold {_brief(missing)}. It holds, and nothing asked for, {_brief(unused)}. Is it the "
            "checkpoint of another model or optimizer?"
        )
    for want in wants:
        saved = tuple(tensors[want.name].size)
        if saved != tuple(want.shape):
            raise CheckpointError(f"{path}: {want.name} has shape {saved}, the model wants {tuple(want.shape)}")


def _brief(found: list[str], most: int = 5) -> str:
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return (", ".join(found[:most]) or "no other tensor") + more


def _read_items(path: Path, number: int, want: Want, saved: TensorStorageMetadata) -> list[ReadItem]:
    """Returns what to read from each saved box for the want at index `number`."""
    items, covered = [], 0
    for chunk in saved.chunks:
        common = intersect(_box(chunk), want.box)
        if common is None:
            continue
        covered += common.numel
        items.append(
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(want.name, want.box.offsets, index=number),
                dest_offsets=torch.Size(common.within(want.box).offsets),
                storage_index=MetadataIndex(want.name, chunk.offsets),
                storage_offsets=torch.Size(common.within(_box(chunk)).offsets),
                lengths=torch.Size(common.sizes),
            )
        )
    if covered != want.box.numel:
        raise CheckpointError(f"{path}: {want.name} has {covered} of the {want.box.numel} elements of {want.box}")
    return items


def _box(chunk: ChunkStorageMetadata) -> Box:
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


class _Into(DefaultLoadPlanner):
    """Tells DCP where in the wants each read goes; DCP copies there, with a cast."""

    def __init__(self, wants: Sequence[Want]) -> None:
        super().__init__(flatten_state_dict=False)
        self.wants = wants

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        number = read_item.dest_index.index
        assert number is not None
        return self.wants[number].into[Box(tuple(read_item.dest_offsets), tuple(read_item.lengths)).slices]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Does nothing: the data was copied into a view of the want."""
