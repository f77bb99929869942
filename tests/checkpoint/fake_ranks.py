"""Ranks as threads over one store, and the pieces and wants of their cuts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore, Store

from shoal.checkpoint import Piece, Want, Writer, share
from shoal.parallel import Layout, boxes_of_range

torch.set_num_threads(1)


@dataclass(frozen=True)
class FakeWorld:
    rank: int = 0
    size: int = 1
    store: Store | None = None
    gone: str = ""

    def lost(self) -> str:
        return self.gone


def on_ranks(size: int, body: Callable[[FakeWorld], Any], store: Store | None = None) -> list[Any]:
    """body(world) on `size` threads; their results, or the first error."""
    store = store or HashStore()
    with ThreadPoolExecutor(size) as pool:
        return [f.result(60) for f in [pool.submit(body, FakeWorld(rank, size, store)) for rank in range(size)]]


def pieces_of(state: dict[str, torch.Tensor], rank: int = 0, size: int = 1) -> list[Piece]:
    return [
        piece
        for name, tensor in state.items()
        for piece in share(name, tensor, Layout.replicated(tuple(tensor.shape)), rank, size)
    ]


def flat_wants(
    like: dict[str, torch.Tensor], rank: int, size: int
) -> tuple[list[Want], list[tuple[str, int, torch.Tensor]]]:
    """Wants of the rank-th even flat cut of every tensor, and what they fill: (name, start, flat values)."""
    wants, filled = [], []
    for name, tensor in like.items():
        shape = tuple(tensor.shape)
        start, stop = (tensor.numel() * r // size for r in (rank, rank + 1))
        flat = torch.full((stop - start,), -1, dtype=tensor.dtype)
        at = 0
        for box in boxes_of_range(shape, start, stop):
            wants.append(Want(name, shape, box, flat[at : at + box.numel].view(box.sizes)))
            at += box.numel
        filled.append((name, start, flat))
    return wants, filled


def save_alone(
    directory: Path, step: int, state: dict[str, torch.Tensor], keep: int = 3, extra: dict | None = None
) -> None:
    writer = Writer(directory, FakeWorld(), keep=keep)
    writer.save(step, pieces_of(state), extra or {}, wait=True)
    writer.close()
