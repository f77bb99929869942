"""Boxes of flat ranges against brute force, and the layout's promises."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.parallel import Box, Layout, Part, boxes_of_range, intersect

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("shape", "start", "stop", "boxes"),
    [
        ((), 0, 1, [Box((), ())]),
        ((), 0, 0, []),
        ((0, 3), 0, 0, []),
        ((5,), 1, 4, [Box((1,), (3,))]),
        ((3, 4), 0, 12, [Box((0, 0), (3, 4))]),
        ((3, 4), 5, 7, [Box((1, 1), (1, 2))]),
        ((3, 4), 2, 9, [Box((0, 2), (1, 2)), Box((1, 0), (1, 4)), Box((2, 0), (1, 1))]),
        ((3, 4), 3, 5, [Box((0, 3), (1, 1)), Box((1, 0), (1, 1))]),
        # 2k-1 = 5 is reached: end of a line, rest of its page, whole pages, lines of the last page, start of a line.
        (
            (4, 3, 2),
            1,
            23,
            [
                Box((0, 0, 1), (1, 1, 1)),
                Box((0, 1, 0), (1, 2, 2)),
                Box((1, 0, 0), (2, 3, 2)),
                Box((3, 0, 0), (1, 2, 2)),
                Box((3, 2, 0), (1, 1, 1)),
            ],
        ),
    ],
)
def test_boxes_by_hand(shape: tuple[int, ...], start: int, stop: int, boxes: list[Box]) -> None:
    assert boxes_of_range(shape, start, stop) == boxes


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@given(ranges())
def test_boxes_hold_the_range_once_in_flat_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    boxes = boxes_of_range(shape, start, stop)
    flat = torch.arange(prod(shape)).reshape(shape)
    seen = [element for box in boxes for element in flat[box.slices].flatten().tolist()]
    assert seen == list(range(start, stop))
    assert all(box.numel > 0 for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@st.composite
def box_pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    dims = draw(st.integers(0, 3))
    axis = st.tuples(st.integers(0, 4), st.integers(0, 4))
    a, b = (draw(st.lists(axis, min_size=dims, max_size=dims)) for _ in range(2))
    return tuple(Box(tuple(o for o, _ in box), tuple(s for _, s in box)) for box in (a, b))  # type: ignore[return-value]


@given(box_pairs())
def test_intersection_holds_the_elements_of_both(pair: tuple[Box, Box]) -> None:
    a, b = pair
    both = [torch.zeros((8,) * len(a.offsets)) for _ in range(2)]
    both[0][a.slices] = 1
    both[1][b.slices] = 1
    common = both[0] * both[1]
    box = intersect(a, b)
    assert (box is None) == (int(common.sum()) == 0)
    if box is not None:
        assert box.numel == int(common.sum())
        assert bool((common[box.slices] == 1).all())


def test_replicated_layout_is_one_part_over_the_whole_tensor() -> None:
    layout = Layout.replicated((2, 3))
    assert layout == Layout((2, 3), (Part(Box((0, 0), (2, 3)), Box((0, 0), (2, 3))),), alike=True)


def test_fused_qkv_is_three_parts() -> None:
    """Rank 1 of 2 holds the second half of q, k and v (2 rows each) of a fused 12-row weight, adjacent in its own
    tensor."""
    world = torch.arange(12 * 2).reshape(12, 2)
    parts = tuple(Part(Box((2 * i, 0), (2, 2)), Box((4 * i + 2, 0), (2, 2))) for i in range(3))
    layout = Layout((12, 2), parts)
    local = torch.empty(6, 2, dtype=world.dtype)
    for part in layout.parts:
        local[part.local.slices] = world[part.world.slices]
    assert local[:, 0].tolist() == [4, 6, 12, 14, 20, 22]


def test_a_part_maps_equal_sizes() -> None:
    with pytest.raises(AssertionError, match="equal sizes"):
        Part(Box((0,), (2,)), Box((0,), (3,)))


@st.composite
def cuts(draw) -> tuple[tuple[int, ...], int, list[tuple[int, int]]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    ends = sorted(draw(st.sets(st.integers(0, shape[dim]), min_size=2, max_size=4)))
    return shape, dim, list(zip(ends[::2], ends[1::2], strict=False))


@given(cuts(), st.data())
def test_what_a_rank_has_of_a_cut_parameter_goes_out_and_comes_back(case, data):
    """Any stretch of its flat tensor, as boxes of the whole one: each element where its layout says, once."""
    shape, dim, stretches = case
    layout, whole = Layout.cut(shape, dim, stretches), torch.arange(prod(shape)).view(shape)
    own = layout.own_part(whole)
    wanted = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in stretches], dim)
    assert torch.equal(own, wanted) and tuple(own.shape) == layout.own_shape
    start = data.draw(st.integers(0, own.numel()))
    stop = data.draw(st.integers(start, own.numel()))
    seen = []
    for box, view in layout.boxes(start, own.flatten()[start:stop]):
        assert torch.equal(whole[box.slices], view)
        seen += view.flatten().tolist()
    assert sorted(seen) == sorted(own.flatten()[start:stop].tolist())
    back = torch.full(shape, -1)
    layout.put_into(back, own)
    assert sorted(back[back >= 0].tolist()) == sorted(own.flatten().tolist()) and torch.equal(
        layout.own_part(back), own
    )


def test_a_layout_that_holds_all_gives_the_tensor_itself():
    whole = torch.zeros(2, 3)
    assert Layout.replicated((2, 3)).own_part(whole) is whole and Layout.replicated((2, 3)).alike
    assert not Layout.cut((2, 3), 1, [(0, 2)]).alike
