"""Writes pieces to files, by the building blocks of `torch.distributed.checkpoint` (DCP); hashes are computed on the
way.

DCP's own `save` would plan through collectives and hold all ranks in step. Here each rank writes on its own, and rank 0
needs only the reports to write the index. The result is a plain DCP checkpoint.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from shoal.checkpoint.manifest import FileRecord
from shoal.checkpoint.pieces import Piece
from shoal.comm.wire import sent
from shoal.parallel.layout import Box


@sent
@dataclass(frozen=True)
class Stored:
    """A box of the tensor `name`, and its position: `length` bytes from `offset` of `file`."""

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype
    file: str
    offset: int
    length: int


@sent
@dataclass(frozen=True)
class Written:
    """The boxes that one rank has written, and its files by name."""

    boxes: list[Stored]
    files: dict[str, FileRecord]


def write_pieces(path: Path, rank: int, pieces: Iterable[Piece]) -> Written:
    """Writes and fsyncs `__R_0.distcp` with the pieces (tensors in host memory). Raises OSError."""
    held = {_index(piece.name, piece.box): piece for piece in pieces}
    if not held:
        return Written([], {})
    plan = SavePlan([_write_item(piece.name, piece.shape, piece.box, piece.tensor.dtype) for piece in held.values()])
    # One thread and no copy-ahead: the pieces are in host memory, and DCP's copy-ahead would wait for the device's
    # stream.
    storage = FileSystemWriter(path, thread_count=1, per_thread_copy_ahead=0)
    storage.fs = files = HashingFileSystem()
    storage.set_up_storage_writer(False, rank=rank, use_collectives=False)  # gives the files their prefix `__R_`
    results = storage.write_data(storage.prepare_local_plan(plan), _Held(held)).wait()
    return Written([_stored(held[result.index], result.storage_data) for result in results], files.records)


def _stored(piece: Piece, at: _StorageInfo) -> Stored:
    assert not at.transform_descriptors, "files are written as they are"
    return Stored(piece.name, tuple(piece.shape), piece.box, piece.tensor.dtype, at.relative_path, at.offset, at.length)


def write_index(path: Path, parts: list[Written]) -> dict[str, FileRecord]:
    """Writes and fsyncs `.metadata` over all ranks' parts; returns its record.

    Raises ValueError when the boxes of a tensor overlap or do not fill it.
    """
    # DCP checks that tensors are filled only for more than one plan; an empty one makes it check always.
    plans = [SavePlan([_write_item(box.name, box.shape, box.box, box.dtype) for box in part.boxes]) for part in parts]
    _, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan([*plans, SavePlan([])])
    storage = FileSystemWriter(path)
    storage.fs = files = HashingFileSystem()
    storage.set_up_storage_writer(True)
    storage.finish(metadata, [[_result(box) for box in part.boxes] for part in parts])
    return files.records


def _index(name: str, box: Box) -> MetadataIndex:
    return MetadataIndex(name, torch.Size(box.offsets))


def _write_item(name: str, shape: tuple[int, ...], box: Box, dtype: torch.dtype) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
    return WriteItem(_index(name, box), WriteItemType.SHARD, tensor_data=data)


def _result(box: Stored) -> WriteResult:
    return WriteResult(_index(box.name, box.box), box.length, _StorageInfo(box.file, box.offset, box.length))


class _Held(DefaultSavePlanner):
    """Gives DCP the data of an item from the pieces."""

    def __init__(self, pieces: dict[MetadataIndex, Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self.pieces = pieces

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.pieces[index].tensor


class HashingFileSystem(FileSystem):
    """DCP's file system, extended to record size and hash of every file written through it, by name."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as raw:
            stream = _HashingStream(cast(io.BufferedIOBase, raw))
            yield stream
        self.records[Path(path).name] = FileRecord(stream.bytes, stream.sha256.hexdigest())

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _HashingStream(io.BufferedIOBase):
    """A stream that appends to `raw` and hashes. Closing it closes `raw`."""

    def __init__(self, raw: io.BufferedIOBase) -> None:
        self.raw_file = raw
        self.bytes = 0
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        self.sha256.update(data)
        written = self.raw_file.write(data)
        self.bytes += written
        return written

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self.raw_file.flush()

    def fileno(self) -> int:
        self.raw_file.flush()  # DCP calls fsync(fileno()) without a flush and would leave the buffer's tail behind
        return self.raw_file.fileno()

    def close(self) -> None:
        self.raw_file.close()
