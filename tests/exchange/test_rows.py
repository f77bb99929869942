"""Sparse gradients of embeddings: the numbers of dense ones, with only rows on the wire."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Engine, Plan
from shoal.comm import Group
from shoal.comm.emulate import simulate
from shoal.comm.simulation import simulate_world
from shoal.errors import UserError
from shoal.exchange.rows import as_rows, row_by_row, sum_rows
from tests.pool import run_ranks

WORDS, WIDTH = 200, 8


class Bag(nn.Module):
    """The mean of a few words' vectors, and a class."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids).mean(1))


class Words(nn.Module):
    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 3, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids).mean(1)


def loss(model: nn.Module, batch) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(model(batch["ids"]), batch["labels"], reduction="sum"), torch.tensor(len(batch["labels"]))


def rows_of_words(words: int = 60) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [
        {"ids": torch.randint(0, words, (4,), generator=draw), "labels": torch.randint(0, 3, (), generator=draw)}
        for _ in range(24)
    ]


def train(
    world, factory, optimizer, exchange="allreduce", words: int = 60
) -> tuple[list[float], list[float], dict[str, Tensor], int]:
    torch.set_num_threads(1)
    running = Engine(
        factory, loss, optimizer, Plan(dp=world.size, exchange=exchange),
        global_batch=6, microbatch=1, clip=0.5, dropout="fused", world=world,
    )  # fmt: skip
    results = [running.step(batch) for batch in running.batches(rows_of_words(words), steps=10)]
    running.close()
    weights = {name: parameter.detach().clone() for name, parameter in running.parameters.items()}
    return (
        [r.loss for r in results],
        [r.grad_norm for r in results],
        weights,
        running.ledger.total("dp", purpose="gradients").payload,
    )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "optimizer", [partial(torch.optim.AdamW, lr=1e-2), partial(torch.optim.SGD, lr=0.1, momentum=0.9)]
)
def test_sparse_gradients_train_as_dense_ones(optimizer, size):
    dense = simulate_world(1, train, partial(Bag, sparse=False), optimizer)[0]
    for sparse in simulate_world(size, train, partial(Bag, sparse=True), optimizer):
        assert sparse[0] == pytest.approx(dense[0], rel=1e-5)
        assert sparse[1] == pytest.approx(dense[1], rel=1e-5)
        for name, value in dense[2].items():
            torch.testing.assert_close(sparse[2][name], value, rtol=1e-4, atol=1e-6)


def test_only_rows_travel():
    dense, sparse = (
        simulate_world(2, train, partial(Bag, sparse=kind), partial(torch.optim.SGD, lr=0.1))[0][3]
        for kind in (False, True)
    )
    assert sparse < dense / 2, "at most 12 of 200 words a rank and step"


@pytest.mark.parametrize("size", [1, 2])
def test_sparse_adam_gets_rows_and_leaves_the_others_alone(size):
    """Against torch: SparseAdam moves only the rows of the batch, moments included."""
    torch.manual_seed(0)
    factory, data = Words, rows_of_words()

    def reference(world) -> Tensor:
        running = Engine(
            factory, loss, partial(torch.optim.SparseAdam, lr=0.1), global_batch=6, dropout="fused", world=world
        )
        module = Words()
        module.words.weight.data.copy_(running.parameters["words.weight"])
        optimizer = torch.optim.SparseAdam(list(module.parameters()), lr=0.1)
        for batch in running.batches(data, steps=10):
            optimizer.zero_grad()
            total, count = loss(module, batch.load(batch.ids))
            (total / count).backward()
            coalesced = module.words.weight.grad.coalesce()
            norm = coalesced.values().norm()
            module.words.weight.grad = coalesced * min(1.0, 0.5 / (float(norm) + 1e-6))
            optimizer.step()
            running.step_index += 1
        return module.words.weight.detach().clone()

    wanted = simulate_world(1, reference)[0]
    got = simulate_world(size, train, factory, partial(torch.optim.SparseAdam, lr=0.1))[0][2]["words.weight"]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_sparse_adam_is_refused_where_each_parameter_has_one_owner():
    with pytest.raises(UserError, match=r"to one owner: SparseAdam takes sparse gradients.*Take plan\.dp alone"):
        Engine(Words, loss, partial(torch.optim.SparseAdam, lr=0.1), Plan(memory={}), global_batch=6)


@pytest.mark.parametrize("exchange", ["allreduce", "none"])
def test_sparse_adam_gets_each_row_once(exchange):
    """Where all rows are touched, so that they are reduced as a whole, and where a rank has rows several times."""
    size = 3 if exchange == "allreduce" else 1
    made = partial(Words, 9), partial(torch.optim.SparseAdam, lr=0.1)
    wanted = simulate_world(1, train, *made, "allreduce", 9)[0][2]["words.weight"]
    for got in simulate_world(size, train, *made, exchange, 9):
        torch.testing.assert_close(got[2]["words.weight"], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exchange", ["adasum", "delayed", "local_sgd", {"name": "qadam", "warmup": 3}])
def test_other_algorithms_take_sparse_gradients(exchange):
    """What they leave in a chunk has rows of other ranks, or of other steps: none of it stays for the next step."""
    exact = {"codec": "fp32", "error_feedback": False} if isinstance(exchange, dict) else {}
    option = {**exchange, **exact} if isinstance(exchange, dict) else exchange
    kind = partial(torch.optim.AdamW, lr=3e-2) if exact else partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    sparse, dense = (simulate_world(3, train, partial(Bag, sparse=each), kind, option) for each in (True, False))
    for ours, theirs in zip(sparse, dense, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
        for name, value in theirs[2].items():
            torch.testing.assert_close(ours[2][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qadam", "onebit_adam"])
@pytest.mark.parametrize("sparse", [False, True])
def test_words_that_come_after_the_warm_up_are_not_thrown_away(sparse, name):
    """They have no variance, and their vectors went to the hundreds."""
    exchange = {"name": name, "warmup": 2}
    for found in simulate_world(2, train, partial(Bag, sparse), partial(torch.optim.AdamW, lr=1e-2), exchange):
        assert float(found[2]["words.weight"].abs().max()) < 20, "drawn from N(0, 1), and ten steps of about 1e-2"


def test_sparse_adam_takes_what_an_algorithm_makes_of_rows():
    first, second = simulate_world(2, train, Words, partial(torch.optim.SparseAdam, lr=0.1), "delayed")
    assert first[0][-1] != first[0][0] and torch.equal(first[2]["words.weight"], second[2]["words.weight"])


@pytest.mark.parametrize(("rows", "gathers"), [(3, True), (90, False)])
def test_many_rows_are_reduced_as_a_whole(rows, gathers):
    def run(group: Group) -> tuple[Tensor, Tensor | None, int]:
        draw = torch.Generator().manual_seed(group.rank)
        mine, dense = torch.randperm(100, generator=draw)[:rows], torch.zeros(100, 4)
        dense[mine] = torch.randn(rows, 4, generator=draw)
        before = dense.clone()
        found = sum_rows(dense, torch.cat([mine, mine]), group, "gradients 0")
        return dense, before, found, group.ledger.total(operation="all_reduce").calls

    results = simulate(3, run)
    total = results[0][1] + results[1][1] + results[2][1]
    for dense, _, found, reductions in results:
        assert torch.equal(dense, results[0][0])
        torch.testing.assert_close(dense, total)
        assert found is not None and reductions == (0 if gathers else 2)
        assert found.tolist() == total.abs().sum(1).nonzero().flatten().tolist()


class Mixed(nn.Module):
    """Embeddings of which two can be had by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.padded = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.limited, self.rows = nn.Embedding(WORDS, WIDTH, max_norm=1.0), nn.Embedding(WORDS, WIDTH, sparse=True)
        self.tied, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.tied.weight
        self.block = nn.Sequential(nn.Embedding(WORDS, WIDTH))


def test_embeddings_whose_gradients_are_had_by_rows():
    model = Mixed()
    cpu = torch.device("cpu")
    pairs = row_by_row(model, [], cpu)
    found = [embedding for embedding, _ in pairs]
    assert found == [model.plain, model.padded, model.block[0]] and all(weight is each.weight for each, weight in pairs)
    assert [embedding for embedding, _ in row_by_row(model, [model.block], cpu)] == found[:2]
    assert row_by_row(model, [], torch.device("cuda", 0)) == []
    model.padded.weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), 0))
    with as_rows(pairs):
        assert [each.sparse for each in found] == [True, False, True], "a hook may take a gradient for whole"
    model.padded.weight._backward_hooks.clear()
    model.padded.weight.requires_grad_(False)
    with as_rows(pairs):
        assert [each.sparse for each in found] == [True, False, True], "an adapter looks up as the frozen one says"
    model.padded.weight.requires_grad_(True)
    with pytest.raises(KeyError), as_rows(pairs):
        assert all(each.sparse for each in found)
        raise KeyError
    assert not any(each.sparse for each in found) and model.rows.sparse


def seen_by_autograd(world, microbatch: int) -> tuple[list[bool], dict[str, Tensor], bool]:
    """Whether gradients were rows when they came, and what became of the weights of words."""
    torch.set_num_threads(1)
    running = Engine(
        partial(Bag, sparse=False),
        loss,
        partial(torch.optim.SGD, lr=0.1),
        global_batch=6,
        microbatch=microbatch,
        world=world,
    )
    rows: list[bool] = []
    weight = running.parameters["words.weight"]
    node = torch.autograd.graph.get_gradient_edge(weight).node  # of which the engine does not know
    handle = node.register_prehook(lambda gradients: rows.append(gradients[0].is_sparse))
    for batch in running.batches(rows_of_words(), steps=4):
        running.step(batch)
    weights = {name: parameter.detach().clone() for name, parameter in running.parameters.items()}
    dense = running.module.words.sparse is False
    handle.remove()
    running.close()
    return rows, weights, dense


def test_a_loss_that_cannot_take_rows_is_told_how_to_have_them_whole():
    """Of an inner gradient, which is of rows as that of the step is."""

    def penalised(model: nn.Module, mb, whole: bool) -> tuple[Tensor, Tensor]:
        total, count = loss(model, mb)
        inner = torch.autograd.grad(total, list(model.parameters()), create_graph=True)
        return total + torch.cat([(each.to_dense() if whole else each).flatten() for each in inner]).norm(), count

    made = partial(Engine, partial(Bag, sparse=False), optimizer=partial(torch.optim.SGD, lr=0.1), global_batch=6)
    running = made(partial(penalised, whole=False))
    with pytest.raises(RuntimeError) as failure:
        running.step(next(running.batches(rows_of_words())))
    assert any("take .to_dense() of them" in note for note in failure.value.__notes__)
    running = made(partial(penalised, whole=True))
    module = Bag(sparse=False)
    module.load_state_dict({name: value.detach().clone() for name, value in running.parameters.items()})
    batch = next(running.batches(rows_of_words()))
    total, count = penalised(module, batch.load(batch.ids), False)
    (total / count).backward()
    running.step(batch)
    for name, value in module.named_parameters():
        wanted = value.detach() - 0.1 * value.grad
        torch.testing.assert_close(running.parameters[name].detach(), wanted, rtol=1e-5, atol=1e-6)


def test_gradients_by_rows_are_those_of_plain_torch():
    ((rows, weights, dense),) = simulate_world(1, seen_by_autograd, 2)
    assert rows == [True] * 12 and dense
    ((_, whole, _),) = simulate_world(1, seen_by_autograd, 6)
    for name, value in whole.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-7)

    def plain(world) -> dict[str, Tensor]:
        running = Engine(
            partial(Bag, sparse=False),
            loss,
            partial(torch.optim.SGD, lr=0.1),
            global_batch=6,
            microbatch=2,
            world=world,
        )
        module = Bag(sparse=False)
        module.load_state_dict({name: value.detach().clone() for name, value in running.parameters.items()})
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for batch in running.batches(rows_of_words(), steps=4):
            optimizer.zero_grad()
            total, count = loss(module, batch.load(batch.ids))
            (total / count).backward()
            optimizer.step()
        running.close()
        return {name: value.detach().clone() for name, value in module.named_parameters()}

    for name, value in simulate_world(1, plain)[0].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-7)


class TiedWords(nn.Module):
    """Words whose vectors are the weights of the head, which is on another stage of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, WIDTH, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, 9, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).mean(1)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.out(x)


def staged(world, plan) -> list[float]:
    torch.set_num_threads(1)
    running = Engine(
        TiedWords, loss, partial(torch.optim.SGD, lr=0.5), Plan(**plan), global_batch=6, microbatch=2, world=world
    )
    losses = [running.step(batch).loss for batch in running.batches(rows_of_words(9), steps=4)]
    running.close()
    return losses


def test_rows_tied_across_stages_are_of_all_that_have_them():
    """The stages waited for each other: one summed up rows, the other all of the weight."""
    wanted = run_ranks(staged, 1, {})[0]
    for plan in ({"pp": 2}, {"dp": 2, "pp": 2}):
        for found in run_ranks(staged, Plan(**plan).size, plan):
            assert found == pytest.approx(wanted, rel=1e-5)
