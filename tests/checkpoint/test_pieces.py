"""Who writes what: every element once, evenly, in boxes of bounded size."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint import Piece, share
from shoal.checkpoint.pieces import SMALL_BYTES, cut
from shoal.parallel import Box, Layout

pytestmark = pytest.mark.fast


def times_written(shape: tuple[int, ...], pieces: list[Piece]) -> torch.Tensor:
    count = torch.zeros(shape, dtype=torch.int32)
    for piece in pieces:
        count[piece.box.slices] += 1
    return count


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (16384,), (130, 140), (7, 31, 90), (1, 20000)])
def test_ranks_write_each_element_once_and_evenly(shape: tuple[int, ...], size: int) -> None:
    tensor = torch.arange(prod(shape), dtype=torch.float32).reshape(shape)
    by_rank = [share("w", tensor, Layout.replicated(shape), rank, size) for rank in range(size)]
    pieces = [piece for mine in by_rank for piece in mine]
    assert bool((times_written(shape, pieces) == 1).all())
    assert all(torch.equal(piece.tensor, tensor[piece.box.slices]) for piece in pieces)
    loads = [sum(piece.tensor.numel() for piece in mine) for mine in by_rank]
    if tensor.nbytes >= SMALL_BYTES:
        assert max(loads) - min(loads) <= 1
    else:
        assert sorted(len(mine) for mine in by_rank) == [0] * (size - 1) + [1]


def test_small_tensors_are_spread_by_a_stable_hash() -> None:
    """The same owners in every process, unlike `hash(str)`: parity of CRC-32."""
    owners = [
        next(r for r in (0, 1) if share(name, torch.zeros(3), Layout.replicated((3,)), r, 2)) for name in "abcdefgh"
    ]
    assert owners == [1, 1, 1, 0, 0, 0, 0, 1]


def test_a_flat_view_stands_for_its_tensor() -> None:
    flat = torch.arange(6.0)
    (piece,) = share("w", flat, Layout.replicated((2, 3)), 0, 1)
    assert torch.equal(piece.tensor, flat.view(2, 3))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(4, 64), st.integers(0, 2))
def test_cut_bounds_boxes_and_keeps_elements(sizes: list[int], limit: int, offset: int) -> None:
    shape = tuple(size + 2 for size in sizes)
    tensor = torch.arange(prod(shape)).to(torch.float32).reshape(shape)
    box = Box((offset,) * len(sizes), tuple(sizes))
    pieces = cut(Piece("w", shape, box, tensor[box.slices]), limit)
    expected = torch.zeros(shape, dtype=torch.int32)
    expected[box.slices] = 1
    assert torch.equal(times_written(shape, pieces), expected)
    assert all(piece.tensor.nbytes <= limit for piece in pieces)
    assert all(torch.equal(piece.tensor, tensor[piece.box.slices]) for piece in pieces)
