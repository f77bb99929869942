"""Reads `.metadata`, the index of a checkpoint: a pickle, as DCP has it, from which only numbers, names and dtypes are
taken.

No class of the pickle is instantiated: the names of those that DCP writes stand for records without behaviour, and any
other name is an error. Their contents are checked, and DCP's own classes are built from them. So an index that somebody
else wrote can neither run code nor name a file elsewhere.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shoal.checkpoint.manifest import is_beside
from shoal.errors import CheckpointError

INDEX = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = (
    *(
        (_METADATA, kind.__name__)
        for kind in (Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata)
    ),
    *((_METADATA, kind.__name__) for kind in (BytesStorageMetadata, ChunkStorageMetadata)),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
)
_IGNORED = (
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("builtins", "getattr"),  # Python 3.11.0 to 3.11.3 write a member of an enum as getattr(enum, name)
)
"""Names that a pickle calls for values that are not used: a memory format, a layout, the folder of the save. A
function that returns None stands for each."""

Value = TypeVar("Value")


def read_index(path: Path) -> Metadata:
    """Returns the index of the checkpoint at `path`. Raises CheckpointError if it is missing, or is not one that a save
    wrote."""
    try:
        with (path / INDEX).open("rb") as file:
            said = _Unpickler(file).load()
        return _metadata(said)
    except Exception as error:  # a damaged pickle may raise any of them
        raise CheckpointError(f"{path}: the index {INDEX} cannot be read: {type(error).__name__}: {error}") from error


class _Record:
    """Stands for an instance of a class of DCP."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):  # TensorProperties
            state = {"dtype": state[0]}
        vars(self).update(state)


class _Unpickler(pickle._Unpickler):
    """An unpickler in Python: the one in C allocates as much memory as a number in the pickle says."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._kinds: dict[tuple[str, str], Any] = {name: type(name[1], (_Record,), {}) for name in _RECORDS}
        self._kinds |= {name: lambda *said: None for name in _IGNORED}
        self._kinds["torch", "Size"] = tuple

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._kinds:
            return self._kinds[module, name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which no index holds. Load only checkpoints of people you trust"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside it")


def _metadata(said: Any) -> Metadata:
    _is_a(said, "Metadata")
    tensors = {_text(name): _entry(entry) for name, entry in _of(dict, said.state_dict_metadata).items()}
    places = {_place(index): _info(info) for index, info in _of(dict, said.storage_data).items()}
    for name, entry in tensors.items():
        for chunk in entry.chunks if isinstance(entry, TensorStorageMetadata) else ():
            if MetadataIndex(name, chunk.offsets) not in places:
                raise ValueError(f"it does not say where {name} at {tuple(chunk.offsets)} lies")
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())


def _entry(said: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(said).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    _is_a(said, "TensorStorageMetadata")
    size = _size(said.size)
    chunks = [ChunkStorageMetadata(_size(chunk.offsets), _size(chunk.sizes)) for chunk in _of(list, said.chunks)]
    for chunk in chunks:
        if len(chunk.offsets) != len(size) or len(chunk.sizes) != len(size):
            raise ValueError(
                f"a box with {len(chunk.offsets)} offsets and {len(chunk.sizes)} sizes in a tensor of {len(size)} dims"
            )
    return TensorStorageMetadata(TensorProperties(dtype=_of(torch.dtype, said.properties.dtype)), size, chunks)


def _place(said: Any) -> MetadataIndex:
    _is_a(said, "MetadataIndex")
    offset = getattr(said, "offset", None)
    return MetadataIndex(_text(said.fqn), None if offset is None else _size(offset))


def _info(said: Any) -> _StorageInfo:
    _is_a(said, "_StorageInfo")
    file = _text(said.relative_path)
    if not is_beside(file):
        raise ValueError(f"it names the file {file!r}, which is not one beside it")
    if getattr(said, "transform_descriptors", None):
        raise ValueError(f"{file} was written through transforms, which Shoal does not have")
    return _StorageInfo(file, _count(said.offset), _count(said.length))


def _is_a(said: Any, kind: str) -> None:
    if not isinstance(said, _Record) or type(said).__name__ != kind:
        raise TypeError(f"a {type(said).__name__} where a {kind} belongs")


def _of(kind: type[Value], said: Any) -> Value:
    if type(said) is not kind:
        raise TypeError(f"a {type(said).__name__} where a {kind.__name__} belongs")
    return said


def _text(said: Any) -> str:
    return _of(str, said)


def _count(said: Any) -> int:
    if _of(int, said) < 0 or said >= 2**63:
        raise ValueError(f"{said} where a count belongs")
    return said


def _size(said: Any) -> torch.Size:
    return torch.Size(_count(each) for each in _of(tuple, said))
