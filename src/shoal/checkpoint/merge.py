"""Makes one checkpoint of several that hold parameters of their own each, as servers that share a model write them. No
value is copied: the files are linked, and one index says what lies where."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from shoal.checkpoint import dcp, directory
from shoal.checkpoint.index import read_index
from shoal.checkpoint.manifest import FileRecord, Manifest, read_manifest, write_manifest
from shoal.checkpoint.save import retire
from shoal.errors import CheckpointError
from shoal.parallel.layout import Box
from shoal.replace import sync

Move = Callable[[dcp.Stored], dcp.Stored | None]
"""Says as which box of which tensor of the whole a part's box counts; None: as none."""


def merge(parts: Sequence[Path], path: Path, keep: int, moves: Sequence[Move | None] = ()) -> None:
    """Writes the checkpoint `path` with the tensors of all `parts`, checkpoints of one step with different tensors.

    Its JSON state is that of the first, with the optimizer's groups of all. Where links cannot be made files are
    copied. `keep`: the newest checkpoints that are kept beside it. `moves`: of each part whose tensors are not those of
    the whole; None: they are. Raises CheckpointError.
    """
    moves = moves or [None] * len(parts)
    manifests = [read_manifest(part) for part in parts]
    tmp, step = directory.tmp_of(path), manifests[0].step
    if any(each.step != step for each in manifests):
        raise CheckpointError(f"{path}: its parts are of the steps {', '.join(str(each.step) for each in manifests)}")
    try:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
        written = [
            _linked(part, each, tmp, number, move)
            for number, (part, each, move) in enumerate(zip(parts, manifests, moves, strict=True))
        ]
        files = dcp.write_index(tmp, written)
        for each in written:
            files.update(each.files)
        extra = _together([each.extra for each in manifests])
        write_manifest(tmp, Manifest(step, moves.count(None), time.time(), files, extra))
        directory.publish(path)
        retire(path.parent, step, keep)
    except (OSError, ValueError) as error:
        shutil.rmtree(tmp, ignore_errors=True)
        raise CheckpointError(f"saving the checkpoint of step {step} in {path.parent} failed: {error}") from error


def _linked(part: Path, manifest: Manifest, tmp: Path, number: int, move: Move | None) -> dcp.Written:
    """Links the files of a part into `tmp` under names of its own; returns what lies in them, as `move` says."""
    index = read_index(part)
    new: dict[str, str] = {}
    boxes = []
    for name, entry in index.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks:
            at = index.storage_data[MetadataIndex(name, chunk.offsets)]
            file = new.setdefault(at.relative_path, f"__{number}_{len(new)}.distcp")
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            dtype = entry.properties.dtype
            stored = dcp.Stored(name, tuple(entry.size), box, dtype, file, at.offset, at.length)
            moved = stored if move is None else move(stored)
            boxes += [] if moved is None else [moved]
    records: dict[str, FileRecord] = {}
    for old, file in new.items():
        try:
            os.link(part / old, tmp / file)
        except OSError:  # another file system, or one without links
            shutil.copyfile(part / old, tmp / file)
            sync(tmp / file)
        records[file] = manifest.files[old]
    return dcp.Written(boxes, records)


def _together(extras: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    groups = [group for each in extras for group in each["groups"]]
    plain = {name: values for each in extras for name, values in each["optim"].items()}
    return {**extras[0], "groups": groups, "optim": plain}
