"""The C loops that reduce: the same bits as torch, for every dtype, operation and special value."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.comm.reductions import COMBINE, finish
from shoal.comm.shm_reductions import DTYPES, OPS, REDUCTIONS
from shoal.native import library

pytestmark = pytest.mark.fast


def reduce_in_c(sources: list[torch.Tensor], op: str, out: torch.Tensor) -> torch.Tensor:
    kernels = library()
    assert kernels is not None
    pointers = (ctypes.c_void_p * len(sources))(*(source.data_ptr() for source in sources))
    codes = [ctypes.c_int64(code) for code in REDUCTIONS[sources[0].dtype, op]]
    outs = (ctypes.c_void_p * 1)(out.data_ptr())
    kernels.shoal_reduce(
        outs, ctypes.c_int64(1), pointers, ctypes.c_int64(len(sources)), ctypes.c_int64(out.nbytes), *codes
    )
    return out


def assert_like_torch(sources: list[torch.Tensor], op: str, out: torch.Tensor | None = None) -> None:
    want = sources[0].clone()
    for source in sources[1:]:
        want = COMBINE[op](want, source)
    want = finish(want, op, len(sources))
    got = reduce_in_c(sources, op, torch.empty_like(want) if out is None else out)
    assert torch.equal(torch.nan_to_num(got, nan=7.0), torch.nan_to_num(want, nan=7.0))
    if got.dtype.is_floating_point:
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.signbit() | got.isnan(), want.signbit() | want.isnan())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", ["sum", "product", "min", "max", "avg"])
def test_every_16_bit_number_with_special_ones(dtype, op):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    for bits in (
        0x0000,
        0x8000,
        0x0001,
        0x03FF,
        0x0400,
        0x3555,
        0x3C01,
        0x3F81,
        0x7BFF,
        0x7C00,
        0x7F80,
        0xFF80,
        0x7FFF,
        0xBC00,
    ):
        other = torch.full((65536,), bits if bits < 32768 else bits - 65536, dtype=torch.int16).view(dtype)
        if op in ("min", "max"):  # which zero is the lesser is left open by torch too
            assert_like_torch([every.abs(), other.abs()], op)
        else:
            assert_like_torch([every, other], op)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_dtype_length_and_number_of_sources_in_place_too(data):
    dtype, op = data.draw(st.sampled_from(sorted(REDUCTIONS, key=str)))
    numel, num_sources = data.draw(st.integers(0, 5000)), data.draw(st.integers(2, 5))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    if dtype.is_floating_point:
        sources = [torch.randn(numel, generator=draw, dtype=torch.float64).to(dtype) for _ in range(num_sources)]
    else:
        info = torch.iinfo(dtype)
        sources = [torch.randint(info.min, info.max, (numel,), generator=draw, dtype=dtype) for _ in range(num_sources)]
    alias = data.draw(st.sampled_from([None, *range(num_sources)]))
    assert_like_torch(sources, op, None if alias is None else sources[alias])


def test_nan_wins_from_either_side():
    nan, one = torch.tensor([float("nan")]), torch.tensor([1.0])
    for op in ("min", "max"):
        assert_like_torch([nan, one], op)
        assert_like_torch([one, nan], op)


def test_the_tables_of_c_and_python_have_the_same_order():
    for dtype in DTYPES:
        for op in OPS:
            if (dtype, op) in REDUCTIONS:
                assert_like_torch([torch.tensor([3, 5], dtype=dtype), torch.tensor([2, 7], dtype=dtype)], op)
