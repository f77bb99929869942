"""Context parallel on its own: who has which tokens, and attention over rows that are shared against attention over
whole ones."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.comm import Group, Lane
from shoal.comm.silent import Silent
from shoal.errors import UserError
from shoal.module.random import attention
from shoal.parallel.context import Context, Parts
from shoal.parallel.context.parts import _between
from shoal.parallel.context.ring import Ring
from tests.parity.covering import in_turn, thinned
from tests.pool import run_ranks

CPU = torch.device("cpu")


def context(size: int, rank: int, ring: bool) -> Context:
    """Of a rank whose others are not there."""
    group = Group.of(Silent(rank, size))
    return Context(group, attention, Lane(CPU, group.ledger) if ring else None)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_token_of_a_row_is_of_one_rank_and_knows_its_place(size, ring):
    rows = torch.arange(2 * 24).view(2, 24)
    seen, positions = [], []
    for rank in range(size):
        here = context(size, rank, ring)
        found = here.cut(
            {"input_ids": rows, "labels": rows + 1, "weights": torch.zeros(2), "pictures": torch.zeros(2, 24, 3)}
        )
        assert torch.equal(found["labels"], found["input_ids"] + 1) and found["weights"].shape == (2,)
        assert found["pictures"].shape == (2, 24 // size, 3)
        assert torch.equal(found["position_ids"], found["input_ids"] % 24), "its place in the whole row"
        assert (found["position_ids"].diff() > 0).all(), "in order, so that a mask by place is one by order"
        seen += found["input_ids"][0].tolist()
        positions.append(found["position_ids"][0])
    assert sorted(seen) == list(range(24))


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 5))
def test_under_a_causal_mask_each_step_of_the_ring_is_as_much_work_for_every_rank(size, half, heads):
    tokens = 2 * half
    for step in range(size):
        work = set()
        for rank in range(size):
            ring = Ring(Group.of(Silent(rank, size)), None, True, 1.0)  # type: ignore[arg-type]
            block = ring.block((rank - step) % size, tokens)
            queries, keys = len(range(tokens)[block.queries]), len(range(tokens)[block.keys])
            work.add((queries * keys, block.causal))
        assert len(work) == 1


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=3), st.data())
def test_a_stretch_of_stretches(runs, data):
    elements = [start + i for start, length in runs for i in range(length)]
    before = data.draw(st.integers(0, len(elements)))
    number = data.draw(st.integers(0, len(elements) - before))
    found = [start + i for start, length in _between(runs, before, number) for i in range(length)]
    assert found == elements[before : before + number]


def test_dropout_asks_for_the_elements_of_its_tokens():
    here = context(2, 1, ring=True)
    here.cut({"input_ids": torch.zeros(3, 8, dtype=torch.int64)})
    parts = Parts(None, here)
    assert parts(torch.zeros(3, 4, 5), 20) == [(10, 10), (20, 10)], "pieces 1 and 2 of four, two tokens of five each"
    assert parts(torch.zeros(3, 7), 7) == [(0, 7)] and parts(torch.zeros(3, 8, 5), 40) == [(0, 40)]
    here.close()
    assert parts(torch.zeros(3, 4, 5), 20) == [(0, 20)], "outside of a microbatch rows are whole"


class OfDocuments(nn.Module):
    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, document_ids: torch.Tensor) -> torch.Tensor:
        """A model that masks by documents."""
        return input_ids


def shared(
    world, kind: str, causal: bool, documents: bool, kv_heads: int, dtype: torch.dtype, width: int = 8
) -> list[float]:
    """By how much the result and the gradients of queries, keys and values (of `width`) differ from those of whole
    rows."""
    draw = torch.Generator().manual_seed(0)
    T, heads = 4 * 6 * world.size, 2 * world.size
    q, k, v, grad = (
        torch.randn(2, h, T, size, generator=draw, dtype=torch.float64).to(dtype)
        for h, size in ((heads, 8), (kv_heads, 8), (kv_heads, width), (heads, width))
    )
    ids = {"input_ids": torch.zeros(2, T, dtype=torch.int64)}
    if documents:
        ids["document_ids"] = (torch.arange(T) // 7).expand(2, T) + torch.tensor([[0], [0]])
        ids["document_ids"] = ids["document_ids"].clone()
        ids["document_ids"][1] = torch.arange(T) // 11
    whole = [each.clone().requires_grad_() for each in (q, k, v)]
    mask = None
    if documents:
        mask = ids["document_ids"][:, None, :, None] == ids["document_ids"][:, None, None, :]
        mask = mask.tril() if causal else mask
    expected = F.scaled_dot_product_attention(
        *whole, mask, is_causal=causal and mask is None, enable_gqa=kv_heads != heads
    )
    expected.backward(grad)
    group = world.group("cp", list(range(world.size)))
    lane = Lane(CPU, world.ledger) if kind == "ring" else None
    here = Context(group, attention, lane)
    here.watch(OfDocuments())
    here.cut(ids)
    mine = [here.own(each, 2).clone().requires_grad_() for each in (q, k, v)]
    own_mask = None
    if documents:
        own = here.own(ids["document_ids"])
        own_mask = own[:, None, :, None] == own[:, None, None, :]
        own_mask = own_mask.tril() if causal else own_mask
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        found = here.attend(*mine, own_mask, 0.0, causal and own_mask is None, enable_gqa=kv_heads != heads)
    found.backward(here.own(grad, 2))
    if lane is not None:
        lane.close()
    wanted = [here.own(expected, 2), *(here.own(each.grad, 2) for each in whole)]
    got = [found, *(each.grad for each in mine)]
    off = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, wanted, strict=True)]
    return [max(off), sum(saved) / sum(each.numel() for each in whole)]


BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


SHARING = [("ring", 2, 4), ("ring", 3, 2), ("ring", 4, 1), ("ulysses", 2, 4), ("ulysses", 3, 6), ("ulysses", 4, 2)]
MASKED = [(*way, causal, documents) for way, causal, documents in product(SHARING, [False, True], [False, True])]
ROWS = [(*row, dtype) for row, dtype in product(MASKED, BOUNDS)]
SOME = [(*row, dtype) for row, dtype in in_turn(MASKED, list(BOUNDS))]  # so each way of sharing meets each dtype


@pytest.mark.parametrize(("kind", "size", "kv_heads", "causal", "documents", "dtype"), thinned(ROWS, SOME))
def test_attention_over_shared_rows_is_that_over_whole_ones(kind, size, kv_heads, causal, documents, dtype):
    for off, kept in run_ranks(shared, size, kind, causal, documents, kv_heads, dtype):
        assert off < BOUNDS[dtype]
        assert documents or kept < 2.2 / size, "of what attention keeps a rank has its part"


@pytest.mark.parametrize("width", [4, 12])
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_values_may_be_narrower_or_wider_than_keys(kind, width):
    for off, _ in run_ranks(shared, 2, kind, True, False, 4, torch.float64, width):
        assert off < BOUNDS[torch.float64]


@pytest.mark.parametrize("size", [2, 4])
def test_a_mask_that_is_learned_is_refused_though_it_begins_as_none(size):
    """Zeros let all tokens see each other: taken for such a mask, it would never be trained."""
    here = context(size, 0, False)
    own = here.cut({"input_ids": torch.zeros(1, 4 * size, dtype=torch.int64)})["input_ids"].shape[1]
    q = torch.zeros(1, size, own, 2)
    bias = nn.Parameter(torch.zeros(size, own, own))
    with pytest.raises(UserError, match=r"computes or learns .* take plan.cp = 1"):
        here.attend(q, q, q, bias)
    with FakeTensorMode() as fake, pytest.raises(UserError, match="computes or learns"):
        here.attend(q, q, q, fake.from_tensor(bias))
