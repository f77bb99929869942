"""Embeddings whose tables lie elsewhere compute what torch's do; and updates by rows."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.optim.groups import make_optimizer, moves_untouched
from shoal.optim.named import OPTIMIZERS
from shoal.server.embeddings import RowsInUse, ServedEmbedding, embeddings_of, without_tables
from shoal.server.served_table import ServedTable
from shoal.server.shares import Rows, Share

pytestmark = pytest.mark.fast


class Servers:
    """Gives rows of a table as clients get them, and counts them."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.pulled = table, 0

    def pull_each(self, table: str, rows: Tensor) -> tuple[Tensor, int]:
        self.pulled += len(rows)
        return self.table[rows].detach(), 0


@pytest.mark.parametrize(
    "kind, options, given",
    [
        (nn.Embedding, {}, {}),
        (nn.Embedding, {"padding_idx": 3}, {}),
        (nn.Embedding, {"padding_idx": 9}, {}),  # which no sample has
        (nn.Embedding, {"scale_grad_by_freq": True}, {}),
        (nn.Embedding, {"sparse": True}, {}),
        (nn.EmbeddingBag, {"mode": "sum"}, {}),
        (nn.EmbeddingBag, {"mode": "mean", "padding_idx": 3}, {}),
        (nn.EmbeddingBag, {"mode": "max"}, {}),
        (nn.EmbeddingBag, {"mode": "sum"}, {"per_sample_weights": torch.rand(2, 4)}),
        (nn.EmbeddingBag, {"mode": "sum", "sparse": True}, {"offsets": torch.tensor([0, 3])}),
        (nn.EmbeddingBag, {"mode": "mean", "include_last_offset": True}, {"offsets": torch.tensor([0, 3, 8])}),
    ],
)
def test_a_forward_and_its_gradients_are_those_of_a_table(kind, options, given):
    ids = torch.tensor([[7, 3, 7, 1], [3, 3, 0, 7]])
    ids = ids.flatten() if "offsets" in given else ids
    torch.manual_seed(0)
    table = kind(10, 4, **options)
    servers, rows = Servers(table.weight), RowsInUse()
    rows.client = servers
    stand_in = ServedEmbedding("t", table, rows, torch.float32)
    for _ in range(2):  # two microbatches
        mine, theirs = stand_in(ids, **given), table(ids, **given)
        assert torch.equal(mine, theirs)
        weights = torch.rand_like(mine)
        for each in (mine, theirs):
            (each * weights).sum().backward()
    assert servers.pulled == 8  # each row once a forward
    once, gradients = rows.gradients(0.5)["t"]
    expected = table.weight.grad.to_dense() * 0.5
    assert set(torch.nonzero(expected)[:, 0].tolist()) <= set(once.tolist()) <= {0, 1, 3, 7}
    torch.testing.assert_close(gradients, expected[once])
    rows.begin()
    with torch.no_grad():
        assert torch.equal(stand_in(ids, **given), table(ids, **given))
    assert rows.gradients(1.0) == {}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)
        self.again = self.words
        self.bag = nn.EmbeddingBag(10, 4)
        self.tied = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.tied.weight
        self.normed = nn.Embedding(10, 4, max_norm=1.0)
        self.frozen = nn.Embedding(10, 4).requires_grad_(False)
        self.other = Scaled(10, 4)


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_sparse_embeddings_are_tables_and_those_that_are_named():
    assert list(embeddings_of(Model(), None)) == ["words.weight"] and not embeddings_of(Model(), [])
    names = ["bag.weight", "words.weight"]
    assert sorted(embeddings_of(Model(), names)) == names
    without = without_tables(Model, dict.fromkeys(names), None, torch.float32)()
    assert without.words is without.again and isinstance(without.bag, ServedEmbedding)
    left = {name for name, _ in Model().named_parameters()} - {name for name, _ in without.named_parameters()}
    assert left == set(names)


@pytest.mark.parametrize(
    "name, why",
    [
        ("tied.weight", "it is tied to the weight of a Linear"),
        ("normed.weight", "max_norm has a forward change its rows"),
        ("frozen.weight", "it is not trained"),
        ("other.weight", "its class Scaled computes otherwise"),
        ("head.weight", "is no weight of an embedding. The model has bag.weight"),
    ],
)
def test_what_is_more_than_rows_is_refused(name, why):
    with pytest.raises(UserError, match=why):
        embeddings_of(Model(), [name])


@pytest.mark.parametrize("count, servers, block", [(1000, 3, 1), (1000, 3, 7), (1000, 1, 7), (3, 5, 1), (13, 4, 2)])
def test_blocks_of_rows_lie_on_one_server_each_once(count, servers, block):
    places = Rows(count, servers, block)
    server, index = places.place(torch.arange(count))
    seen = torch.zeros(count, dtype=torch.int64)
    for each in range(servers):
        for start, first, length in places.stretches(each):
            rows = torch.arange(first, first + length)
            assert (server[rows] == each).all() and index[rows].tolist() == list(range(start, start + length))
            assert [places.row(each, start + offset) for offset in range(length)] == rows.tolist()
            seen[rows] += 1
        size = places.size(each)
        mine = places.of(each, slice(0, size))
        own = torch.nonzero(server == each)[:, 0]
        assert len(mine) == size and mine[mine < count].sort().values.tolist() == own.tolist()
    assert (seen == 1).all()


def test_optimizers_that_leave_rows_alone_that_have_no_gradient():
    plain = {"weight_decay": 0.0}
    still = {name for name, kind in OPTIMIZERS.items() if not moves_untouched(partial(kind, lr=0.1), plain)}
    assert still == {"sgd", "adagrad"}
    assert moves_untouched(partial(torch.optim.SGD, lr=0.1, momentum=0.9), plain)
    assert moves_untouched(partial(torch.optim.SGD, lr=0.1), {"weight_decay": 0.1})


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, partial(torch.optim.Adagrad, lr_decay=0.1)])
def test_updates_of_rows_are_those_of_the_whole(optimizer, tmp_path):
    """Of two servers, with clipping, to the bit; and what they write is one tensor that any number reads."""
    torch.manual_seed(0)
    start, factory = torch.randn(30, 4), partial(make_optimizer, partial(optimizer, lr=0.1))
    whole = nn.Parameter(start.clone())
    reference = factory([{"params": [whole]}])
    tables = [ServedTable("t", start, factory, Share(index, 2)) for index in range(2)]
    for factor in (1.0, 0.5):
        pushes = [(rows := torch.randperm(30)[:9].sort().values, torch.randn(len(rows), 4)) for _ in range(2)]
        whole.grad = torch.zeros(30, 4)
        for rows, gradients in pushes:
            whole.grad[rows] += gradients
        whole.grad.div_(2)
        assert sum(table_squares(tables, pushes)) == pytest.approx(float(whole.grad.square().sum()), rel=1e-6)
        whole.grad.mul_(factor)
        reference.step()
        for table in tables:
            table.apply(torch.tensor(factor), 0.1)
    for index, table in enumerate(tables):
        mine = torch.nonzero(table.places.place(torch.arange(30))[0] == index)[:, 0]
        assert torch.equal(table.read(mine), whole.detach()[mine])


def table_squares(tables, pushes):
    """The squared norm of the mean, by server."""
    for index, table in enumerate(tables):
        own = []
        for rows, gradients in pushes:
            mine = table.places.place(rows)[0] == index
            own.append((rows[mine], gradients[mine]))
        table.mean(own, [1.0, 1.0])
        yield float(table._mean.double().square().sum())
