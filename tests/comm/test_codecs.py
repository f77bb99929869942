"""Codecs: bounds by hand and by hypothesis, the same bytes from kernel and torch, nothing non-finite hidden, nothing
written beside."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.comm.codecs import U4, U8, Cast, Codec, Sign, TopK, cast, codec, minmax, rows, topk
from shoal.errors import UserError
from shoal.native import library

ALL = ["fp32", "fp16", "bf16", "u8", "u4", "sign", "topk"]
SIZES = [0, 1, 2, 7, 8, 9, 15, 16, 17, 100, 127, 511, 512, 513, 1023, 1024, 1025, 2048, 3000, 9_001]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
numbers = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100), max_size=70
)


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed + numel))


def encoded(form: Codec, flat: Tensor) -> Tensor:
    out = torch.empty(form.encoded_bytes(flat.numel()), dtype=torch.uint8)
    form.encode(flat, out)
    return out


def sent(form: Codec, flat: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a receiver decodes."""
    out = torch.full_like(flat, 7, dtype=dtype)
    form.decode(encoded(form, flat), out)
    return out


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that the tests' tensors take several."""
    for module in (cast, rows, topk):
        monkeypatch.setattr(module, "BLOCK", 4096)


@pytest.fixture
def no_kernels(monkeypatch):
    def remove() -> None:
        monkeypatch.setattr(rows, "library", lambda: None)
        monkeypatch.setattr(topk, "library", lambda: None)

    return remove


@pytest.mark.fast
def test_u8_by_hand():
    """Row 0..255 has scale 1 and minimum 0, so the codes are the values; -1..1 has 2 / 255 and codes 0, 128 (127.5 to
    even), 255."""
    data = encoded(U8(256), torch.cat((torch.arange(256.0), torch.tensor([-1.0, 0.0, 1.0]))))
    assert data[:8].view(torch.float32).tolist() == [1.0, 0.0]
    assert data[8:264].tolist() == list(range(256))
    assert data[264:272].clone().view(torch.float32).tolist() == pytest.approx([2 / 255, -1.0])
    assert data[272:].tolist() == [0, 128, 255]


@pytest.mark.fast
def test_u4_by_hand():
    """Five elements take three bytes: 0 and 9 in the first, 3 and 15 in the second, 6 alone in the third."""
    data = encoded(U4(8), torch.tensor([0.0, 3.0, 6.0, 9.0, 15.0]))
    assert data[:8].view(torch.float32).tolist() == [1.0, 0.0]
    assert data[8:].tolist() == [0 | 9 << 4, 3 | 15 << 4, 6]


@pytest.mark.fast
def test_sign_by_hand():
    """Nine elements take two bytes: bit b of byte i is element 2 b + i. The mean magnitude is 18 / 9."""
    data = encoded(Sign(16), torch.tensor([1.0, -1, 2, -2, 3, -3, 0, -4, 2]))
    assert data[:4].view(torch.float32).tolist() == [2.0]
    assert data[4:].tolist() == [0b11111, 0]
    assert sent(Sign(16), torch.tensor([3.0, -1.0])).tolist() == [2.0, -2.0]


@pytest.mark.fast
def test_topk_by_hand():
    data = encoded(TopK(0.5), torch.tensor([0.0, -3.0, 1.0, 2.0]))
    assert data[:8].view(torch.int32).tolist() == [1, 3] and data[8:].view(torch.float32).tolist() == [-3.0, 2.0]
    assert sent(TopK(0.5, "fp16"), torch.tensor([0.0, -3.0, 1.0, 2.0])).tolist() == [0.0, -3.0, 0.0, 2.0]


@pytest.mark.fast
@given(numbers, st.sampled_from([8, 16, 64]), st.sampled_from([(U8, 255), (U4, 15)]))
def test_no_element_is_off_by_more_than_half_a_step(values, row, form):
    flat = torch.tensor(values)
    kind, levels = form
    decoded = sent(kind(row), flat)
    for start in range(0, len(values), row):
        x, y = flat[start : start + row].double(), decoded[start : start + row].double()
        bound = (x.max() - x.min()) / (2 * levels) + 2**-21 * x.abs().max() + minmax._SMALLEST_RANGE
        assert (y - x).abs().max() <= bound


@pytest.mark.fast
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.3, 1e-30, 60000.0])
def test_constant_rows_come_back_exactly(name, value):
    flat = torch.full((1500,), value)
    expected = flat.to(getattr(codec(name), "dtype", torch.float32)).float()
    decoded = sent(codec({"name": "topk", "ratio": 1} if name == "topk" else name), flat)
    if name == "sign":
        assert torch.allclose(decoded, flat, rtol=1e-6, atol=0)
    else:
        assert torch.equal(decoded, expected)


@pytest.mark.fast
@pytest.mark.parametrize(
    "form", [U8(), U8(64), U4(), U4(64), U4(8), Sign(), Sign(8), Sign(24), TopK(), TopK(0.3, "fp16")], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_and_torch_agree_to_the_bit(form, dtype, no_kernels):
    assert library() is not None, "the standard machine has a C compiler"

    def run() -> list[Tensor]:
        results = []
        for numel in SIZES:
            for bad in (None, math.nan, math.inf, -math.inf):
                flat = gaussian(numel).to(dtype)
                flat[numel // 3 :: 2000] = 0.0 if bad is None else bad
                decoded, total = torch.empty_like(flat), gaussian(numel, 1).to(dtype)
                data = encoded(form, flat)
                form.decode(data, decoded)
                form.decode_add(data, total)
                form.decode_add(data, total, -0.3)
                results += [
                    data,
                    *(t.view(torch.uint8) for t in (decoded.nan_to_num(nan=-5), total.nan_to_num(nan=-5))),
                ]
        return results

    native = run()
    no_kernels()
    for left, right in zip(native, run(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.fast
@given(numbers)
def test_kernel_and_torch_agree_on_any_numbers(values):
    flat = torch.tensor(values)
    for form in (U8(8), U4(8), Sign(8)):
        data, expected = encoded(form, flat), torch.empty(form.encoded_bytes(len(flat)), dtype=torch.uint8)
        for matrix, out in form._matrices(flat, expected):
            form.encode_rows(matrix, out)
        assert torch.equal(data, expected)


@pytest.mark.fast
@pytest.mark.parametrize(
    "values", [[-0.0, 0.0], [0.0, -0.0, -1.0], [-0.0] * 9, [-0.0, 2.0], [1e-38, 2e-38], [1e-36, 3e-36]]
)
@pytest.mark.parametrize("form", [U8(8), U4(8), Sign(8)], ids=str)
def test_zeros_of_both_signs_and_tiny_ranges_have_one_encoding(form, values, no_kernels):
    data = encoded(form, torch.tensor(values))
    no_kernels()
    assert torch.equal(data, encoded(form, torch.tensor(values)))
    assert sent(form, torch.tensor(values)).isfinite().all()


@pytest.mark.fast
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("form", [U8(), U4()], ids=str)
def test_a_range_without_a_reciprocal_decodes_to_its_minimum(form, kernels, no_kernels):
    if not kernels:
        no_kernels()
    decoded = sent(form, torch.tensor([9e-37, 1e-37]))
    assert torch.equal(decoded, torch.tensor([1e-37, 1e-37]))


@pytest.mark.fast
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ALL)
def test_nothing_that_is_not_finite_is_hidden(name, bad, kernels, no_kernels):
    if not kernels:
        no_kernels()
    for numel in (1, 2, 9, 63, 64, 65, 700, 1030):
        for place in {0, 1, numel // 2, numel - 1, min(numel - 1, 64)} & set(range(numel)):
            flat = gaussian(numel)
            flat[place] = bad
            assert not sent(codec(name), flat).isfinite().all(), (numel, place)
            total = torch.zeros(numel)
            codec(name).decode_add(encoded(codec(name), flat), total)
            assert not total.isfinite().all(), (numel, place)


@pytest.mark.fast
@pytest.mark.parametrize("form", [U8(), U4()], ids=str)
def test_one_bad_row_leaves_the_others(form):
    flat = gaussian(4 * form.row)
    flat[form.row] = math.nan
    finite = sent(form, flat).view(4, -1).isfinite()
    assert finite.all(1).tolist() == [True, False, True, True] and not finite[1].any()


@pytest.mark.fast
def test_overflow_is_seen():
    assert sent(codec("fp16"), torch.tensor([70000.0, -70000.0, 1.0])).tolist() == [math.inf, -math.inf, 1.0]
    assert sent(codec({"name": "topk", "ratio": 1.0, "values": "fp16"}), torch.tensor([70000.0])).tolist() == [math.inf]
    for name in ("u8", "u4"):
        assert sent(codec(name), torch.tensor([3e38, -3e38])).isnan().all()


@pytest.mark.fast
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("stride", [0, 3])
def test_one_element_has_the_bytes_of_its_value_whatever_its_stride_is(name, stride):
    """As the gradient of a sum, which counts as contiguous."""
    form, one = codec(name), torch.empty_strided((1,), (stride,)).fill_(2.5)
    buffer = torch.zeros(1 + form.encoded_bytes(1), dtype=torch.uint8)
    form.encode(one, buffer[1:])  # where no element may begin
    assert torch.equal(buffer[1:], encoded(form, torch.tensor([2.5])))


@pytest.mark.fast
@pytest.mark.parametrize("form", [codec("fp16"), codec("bf16"), codec("fp32"), U8(64), U4(64), Sign(64)], ids=str)
@pytest.mark.parametrize("cuts", [(64,), (640, 704), (64, 128, 960)])
def test_row_aligned_cuts_have_the_bytes_of_the_whole(form, cuts):
    flat = gaussian(1000)
    pieces = torch.tensor_split(flat, cuts)
    assert form.row is not None and all(cut % form.row == 0 for cut in cuts)
    assert torch.equal(torch.cat([encoded(form, piece) for piece in pieces]), encoded(form, flat))


@pytest.mark.fast
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_exactly_the_encoded_bytes_are_filled_at_any_address(name, offset):
    form = codec(name)
    for numel in SIZES:
        flat, size = gaussian(numel), form.encoded_bytes(numel)
        buffer = torch.full((offset + size + 16,), 171, dtype=torch.uint8)
        form.encode(flat, buffer[offset : offset + size])
        assert torch.equal(buffer[offset : offset + size], encoded(form, flat))
        assert buffer[:offset].eq(171).all() and buffer[offset + size :].eq(171).all()
        out = torch.full((numel + 16,), 171.0)
        form.decode(buffer[offset : offset + size], out[:numel])
        assert torch.equal(out[:numel], sent(form, flat)) and out[numel:].eq(171).all()


@pytest.mark.fast
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_other_types_go_through_fp32(name, dtype):
    form, flat, start = codec(name), gaussian(9_001).to(dtype), gaussian(9_001, 1).to(dtype)
    assert torch.equal(encoded(form, flat), encoded(form, flat.float()))
    decoded = sent(form, flat)
    assert torch.equal(sent(form, flat, dtype), decoded.to(dtype))
    wide, total = torch.promote_types(dtype, torch.float32), start.clone()
    form.decode_add(encoded(form, flat), total, -0.5)
    assert torch.equal(total, (start.to(wide) + -0.5 * decoded).to(dtype))


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("numel", [topk._EXACT_BELOW - 1, topk._EXACT_BELOW + 3])
@pytest.mark.parametrize("shape", ["gaussian", "sparse", "sorted", "bad", "constant"])
def test_topk_is_exact_whatever_the_sample_says(shape, numel, kernels, no_kernels):
    if not kernels:
        no_kernels()
    flat = gaussian(numel)
    if shape == "sparse":
        flat[torch.arange(numel) % 1000 != 3] = 0.0
    if shape == "sorted":
        flat = flat.sort().values
    if shape == "bad":
        flat[::300] = math.nan
    if shape == "constant":
        flat.fill_(2.0)
    form = TopK(0.01)
    decoded = sent(form, flat)
    kept = torch.topk(flat.abs(), form.entries(numel)).values
    assert torch.equal(
        decoded.abs()[decoded != 0].sort(descending=True).values.nan_to_num(), kept[kept != 0].nan_to_num()
    )
    assert shape == "bad" or torch.equal(decoded[decoded != 0], flat[decoded != 0])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("form", "error"),
    [
        (Cast(torch.float16), 2.1e-4),
        (Cast(torch.bfloat16), 1.7e-3),
        (U8(), 7.4e-3),
        (U4(), 0.118),
        (Sign(), 0.603),
        (TopK(), 0.956),
    ],
    ids=str,
)
def test_the_error_on_gaussian_values_is_what_the_docstring_says(form, error):
    flat = gaussian(1 << 20)
    assert ((sent(form, flat) - flat).norm() / flat.norm()).item() == pytest.approx(error, rel=0.03)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("b16", 'codec "b16" is not one of fp32, fp16, bf16, u8, u4, sign, topk. Did you mean "bf16"?'),
        ({"name": "u8", "rows": 64}, 'codec "u8" has no parameter "rows". Did you mean "row"? Parameters: row'),
        ({"name": "fp16", "row": 64}, 'codec "fp16" has no parameter "row". Parameters: none'),
        ({"name": "u4", "row": 100}, "codec u4: row = 100 is not a multiple of 8 between 8 and 65536"),
        ({"name": "sign", "row": 0}, "row = 0"),
        ({"name": "u8", "row": "64"}, "row = '64'"),
        ({"name": "topk", "ratio": 1.5}, "ratio = 1.5"),
        ({"name": "topk", "values": "bf16"}, "values = 'bf16' is not one of fp32, fp16"),
        ({"row": 64}, "give a name, or a table"),
    ],
)
def test_wrong_options_are_refused(option, message):
    with pytest.raises(UserError) as caught:
        codec(option)
    assert message in str(caught.value)


@pytest.mark.fast
def test_options_reach_the_codec():
    assert codec({"name": "u8", "row": 64}) == U8(64)
    assert codec({"name": "topk", "ratio": 0.1, "values": "fp16"}) == TopK(0.1, "fp16")
    assert [name for name in ALL if codec(name).lossless] == ["fp32"]


@pytest.mark.fast
@pytest.mark.parametrize("name", ALL)
def test_tensors_that_do_not_fit_are_refused(name):
    form, flat = codec(name), gaussian(20)
    data = encoded(form, flat)
    for call in (form.encode, lambda x, out: form.decode(out, x), lambda x, out: form.decode_add(out, x)):
        with pytest.raises(ValueError, match="20 elements are"):
            call(flat, data[:-1])
        with pytest.raises(ValueError, match="20 elements are"):
            call(flat, data.to(torch.int8))
        with pytest.raises(ValueError, match="contiguous 1-D floating"):
            call(flat.view(4, 5), data)
        with pytest.raises(ValueError, match="contiguous 1-D floating"):
            call(gaussian(40)[::2], data)
        with pytest.raises(ValueError, match="contiguous 1-D floating"):
            call(flat.int(), data)
