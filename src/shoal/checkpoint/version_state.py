"""Earlier weights in a checkpoint, which a schedule without a flush still needs: by how many updates ago."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from shoal.checkpoint.pieces import Piece, canonical, wants_of
from shoal.checkpoint.role import WriterRole
from shoal.checkpoint.source import Source


def version_pieces(versions: Mapping[int, Mapping[str, Tensor]], role: WriterRole) -> list[Piece]:
    """Returns the pieces that this rank writes of earlier weights, given as {number of updates ago: {parameter:
    tensor}}.

    They are equal on all replicas.
    """
    return [
        piece
        for ago, tensors in versions.items()
        for name, tensor in tensors.items()
        for piece in role.share(f"version.{ago}.{name}", name, canonical(tensor.detach()))
    ]


def versions_saved(source: Source, names: Collection[str], most: int) -> list[int]:
    """Returns the versions 1, 2, .. (updates ago) of the weights `names` that `source` has, without gaps, at most
    `most`."""
    saved, found = source.shapes(), list[int]()
    while len(found) < most and all(f"version.{len(found) + 1}.{name}" in saved for name in names):
        found.append(len(found) + 1)
    return found


@torch.no_grad()
def restore_versions(source: Source, versions: Mapping[int, Mapping[str, Tensor]], role: WriterRole) -> None:
    """Reads earlier weights in place, given as for `version_pieces`."""
    for ago, tensors in versions.items():
        read = {name: torch.empty(tensor.shape, dtype=canonical(tensor[:0]).dtype) for name, tensor in tensors.items()}
        source.load(
            [
                want
                for name, into in read.items()
                for want in wants_of(f"version.{ago}.{name}", role.layout(name, into), into)
            ]
        )
        for name, tensor in tensors.items():
            tensor.copy_(read[name])
