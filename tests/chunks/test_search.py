"""The search for a chunk size: its numbers are those of chunks that are made, and its choice is the best of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.chunks import ChunkKey, ChunkMaker, search
from shoal.chunks.allocate import Private
from shoal.chunks.make import Keeping
from shoal.chunks.search import AT_A_TIME, SHARE, SMALLEST
from shoal.chunks.shard import Gathered, Shards
from shoal.precision import precision

CPU = torch.device("cpu")


class Ranks:
    """As much of a group as making chunks asks for."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def allocate_common(self, numel: int, dtype: torch.dtype) -> None:
        return None


class Bag(nn.Module):
    def __init__(self, shapes, frozen) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
        for place in frozen:
            self.weights[place % len(shapes)].requires_grad_(False)


SHAPES = st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=2).map(tuple), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(
    shapes=SHAPES,
    frozen=st.lists(st.integers(0, 19), max_size=3),
    ranks=st.integers(1, 5),
    whole=st.booleans(),
    low=st.booleans(),
    budget=st.one_of(st.none(), st.integers(1, 3_000_000)),
)
def test_the_numbers_are_those_of_the_chunks_and_none_is_better(shapes, frozen, ranks, whole, low, budget):
    module, kind = Bag(shapes, frozen), precision("bf16" if low else "fp32")
    group = Ranks(ranks)
    shards = Shards(group, group, None, CPU, 3, Private(CPU), whole)
    member = {name: index % 2 for index, (name, _) in enumerate(module.named_parameters())}
    maker = ChunkMaker(module, member, kind, Private(CPU), {"": Keeping(Private(CPU), shards)})
    choice = search(maker.described, ranks, kind.grad.itemsize, whole, budget)
    for each in choice.candidates:
        chunks = maker.make(maker.cut(each.chunk_bytes))
        assert all(chunk.passes and isinstance(chunk.placement, Gathered) for chunk in chunks)
        used = sum(slot.numel * chunk.data.itemsize for chunk in chunks for slot in chunk.slots)
        assert each.chunks == len(chunks)
        assert each.weights == sum(chunk.nbytes_whole for chunk in chunks) == each.padding + used
        gradient = max((chunk.size * chunk.grad_dtype.itemsize for chunk in chunks if chunk.trainable), default=0)
        assert each.in_use == AT_A_TIME * (max(chunk.nbytes_whole for chunk in chunks) + gradient)
        assert each.waste == pytest.approx(each.padding / each.weights)
    fit = [each for each in choice.candidates if budget is None or each.in_use <= SHARE * budget]
    usual = [each for each in fit if each.chunk_bytes >= SMALLEST]
    if fit:
        assert choice.best in (usual or fit)
        assert all(
            (choice.best.cost, -choice.best.chunk_bytes) <= (each.cost, -each.chunk_bytes) for each in usual or fit
        )
    else:
        assert choice.best.in_use == min(each.in_use for each in choice.candidates)


def test_by_hand():
    """Five matrices of 1 MiB: chunks of one are as large as what must be in use anyway, larger ones only cost."""
    key = ChunkKey(torch.float32, "dp", 0, True)
    parameters = [(f"w{place}", torch.Size([512, 512]), key) for place in range(5)]
    choice = search(parameters, 1, 4)
    assert (choice.best.chunk_bytes, choice.best.chunks, choice.best.padding, choice.best.in_use) == (
        3 * 2**19,
        5,
        0,
        4 * 2**20,
    )
    assert [each.chunks for each in choice.candidates if each.chunk_bytes == 4 * 2**20] == [2]


def test_pages_of_an_update_on_the_device_are_in_use_too():
    """Three pages of a master and two moments for each element of a stretch, here half of a chunk."""
    key = ChunkKey(torch.bfloat16, "dp", 0, True)
    parameters = [(f"w{place}", torch.Size([64, 64]), key) for place in range(200)]
    plain, turns = (search(parameters, 2, 4, in_turn=each) for each in (0, 36))
    for one, other in zip(plain.candidates, turns.candidates, strict=True):
        largest = one.in_use // AT_A_TIME // (2 + 4)
        assert other.in_use - one.in_use == 36 * largest // 2
    assert turns.best.chunk_bytes <= plain.best.chunk_bytes
    budget = 2 * plain.best.in_use
    assert search(parameters, 2, 4, budget=budget).best.in_use <= SHARE * budget
    assert search(parameters, 2, 4, budget=budget, in_turn=36).best.chunk_bytes < plain.best.chunk_bytes


def test_a_small_budget_takes_small_chunks():
    key = ChunkKey(torch.float32, "dp", 0, True)
    parameters = [(f"w{place}", torch.Size([64, 64]), key) for place in range(100)]
    assert search(parameters, 1, 4).best.chunk_bytes >= SMALLEST
    best = search(parameters, 1, 4, budget=2**19).best
    assert best.chunk_bytes < SMALLEST and best.in_use <= SHARE * 2**19
