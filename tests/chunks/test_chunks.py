"""Chunks: the cut into slots, alignment, permanent views, tied and frozen parameters."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.chunks import ChunkKey, ChunkMaker, Slot, adopt, assign, flat_views
from shoal.chunks.allocate import Private
from shoal.chunks.make import Keeping
from shoal.module.build import build
from shoal.precision import precision

pytestmark = pytest.mark.fast
KEY = ChunkKey(torch.float32, "dp", 0, True)


def test_the_cut_worked_by_hand():
    """64 bytes are 16 floats: b starts at 16 and is the end of a full chunk, c is too little to travel alone and takes
    d with it."""
    parameters = [
        ("a", torch.Size([3]), KEY),
        ("b", torch.Size([16]), KEY),
        ("c", torch.Size([1]), KEY),
        ("d", torch.Size([50]), KEY),
    ]
    cut = [[(slot.name, slot.offset) for slot in slots] for _, slots in assign(parameters, 32 * 4, 4)]
    assert cut == [[("a", 0), ("b", 16)], [("c", 0), ("d", 16)]]


def test_chunks_are_ordered_by_when_they_are_full():
    other = ChunkKey(torch.float32, "dp", 1, True)
    order = [("a", torch.Size([1]), KEY), ("x", torch.Size([1]), other), ("b", torch.Size([1]), KEY)]
    assert [[slot.name for slot in slots] for _, slots in assign(order, 1000, 4)] == [["x"], ["a", "b"]]


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 2)), min_size=1, max_size=30), st.integers(1, 2000))
def test_every_parameter_has_one_aligned_place_of_its_own(sizes, chunk_bytes):
    keys = [KEY, ChunkKey(torch.bfloat16, "dp", 0, True), ChunkKey(torch.float32, "dp", 0, False)]
    parameters = [(str(i), torch.Size([numel]), keys[key]) for i, (numel, key) in enumerate(sizes)]
    cut = assign(parameters, chunk_bytes, 4)
    assert sorted(slot.name for _, slots in cut for slot in slots) == sorted(name for name, _, _ in parameters)
    for key, slots in cut:
        assert all(parameters[int(slot.name)][2] == key for slot in slots)
        for before, after in itertools.pairwise(slots):
            assert after.offset >= before.offset + before.numel
            assert after.offset * min(4, key.dtype.itemsize) % 64 == 0
        size = (slots[-1].offset + slots[-1].numel) * 4
        assert len(slots) == 1 or size <= max(chunk_bytes, 4) or slots[-1].offset * 4 <= chunk_bytes / 2


@pytest.mark.parametrize("chosen", [range(4), [0], [1, 3], [2], []])
def test_flat_views_are_those_of_the_slots_whatever_lies_between(chosen):
    shapes, offsets = [(2, 3), (1,), (0, 4), (5,)], [3, 16, 17, 20]
    slots = [Slot(str(i), torch.Size(shapes[i]), offsets[i]) for i in chosen]
    flats = torch.arange(30), torch.arange(30) * -1.0
    for flat, views in zip(flats, flat_views(slots, *flats), strict=True):
        assert [view.tolist() for view in views] == [slot.view(flat).flatten().tolist() for slot in slots]
        for view in views:
            view.fill_(100)
        assert int((flat == 100).sum()) == sum(slot.numel for slot in slots), "they are views"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.rnn = nn.LSTM(4, 4)


def adopted(name: str):
    built, chosen = build(Tied, 0), precision(name)
    device = torch.device("cpu")
    member = {key: 0 for key, _ in built.module.named_parameters()}
    maker = ChunkMaker(built.module, member, chosen, Private(device), {"": Keeping(Private(device), None)})
    chunks = maker.make(maker.cut(1 << 20))
    return built.module, chunks, adopt(built.module, chunks, built.value, chosen, device)


def test_parameters_are_views_and_tied_ones_the_same_object():
    module, chunks, parameters = adopted("fp32")
    assert module.head.weight is module.embedding.weight is parameters["embedding.weight"]
    assert module.rnn._flat_weights[0] is module.rnn.weight_ih_l0, "kernels of recurrent layers read the list"
    pointers = {chunk.data.untyped_storage().data_ptr() for chunk in chunks}
    assert all(p.untyped_storage().data_ptr() in pointers for p in module.parameters())
    assert sum(chunk.trainable for chunk in chunks) == 1 and all(chunk.data.data_ptr() % 64 == 0 for chunk in chunks)
    assert not module.frozen.weight.requires_grad
    trained = next(chunk for chunk in chunks if chunk.trainable)
    assert trained.slots[-1].name == "embedding.weight", "its gradient is complete last"


def test_low_precision_keeps_masters_and_batchnorm_in_fp32():
    module, chunks, _ = adopted("bf16")
    assert (
        module.head.weight.dtype == torch.bfloat16
        and module.norm.weight.dtype == module.norm.running_mean.dtype == torch.float32
    )
    for chunk in chunks:
        if not chunk.trainable:
            assert chunk.grad is None and chunk.master is chunk.data
            continue
        assert chunk.master.dtype == chunk.grad.dtype == torch.float32 and torch.equal(
            chunk.data, chunk.master.to(chunk.data.dtype)
        )
    low = next(chunk for chunk in chunks if chunk.data.dtype == torch.bfloat16 and chunk.trainable)
    low.master.fill_(0.3)
    low.publish()
    assert low.data.unique().tolist() == [torch.tensor(0.3).bfloat16().item()]
    assert low.nbytes == low.size * (2 + 4 + 4)


def test_fp64_starts_from_the_same_weights():
    double, single = adopted("fp64")[0], adopted("fp32")[0]
    assert double.head.weight.dtype == torch.float64
    assert torch.equal(double.head.weight.float(), single.head.weight)
