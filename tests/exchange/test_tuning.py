"""The cut of chunks by measured links and recorded order: when gradients travel changes, what is computed never."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from shoal import Engine, Plan
from shoal.chunks import ChunkKey, assign
from shoal.chunks.assign import departure
from shoal.comm import Link, links
from shoal.exchange.algorithm import USUAL_CHUNK
from shoal.exchange.named import algorithm
from shoal.exchange.tuning import LARGEST, SMALLEST, chunk_bytes
from shoal.models.losses import regression
from tests.pool import run_ranks

KEY = ChunkKey(torch.float32, "dp", 0, True)
WIDTH = 256


@pytest.mark.fast
def test_a_chunk_is_the_root_of_latency_times_bandwidth_times_gradients():
    """sqrt((0.4 ms + 0.1 ms of our own) x 100 MB/s x 200 MB) = 3.16 MB; the nearest power of two is 4 MiB."""
    link = Link("dp", 2, "sockets", ((1000, 0.4e-3), (10_001_000, 0.4e-3 + 0.10001)))
    assert chunk_bytes(algorithm("allreduce"), 200_000_000, link) == 4 * 2**20
    assert chunk_bytes(algorithm("allreduce"), 2_000_000, link) == SMALLEST
    assert chunk_bytes(algorithm("allreduce"), 10**14, link) == LARGEST
    assert chunk_bytes(algorithm("allreduce"), 200_000_000, None) == USUAL_CHUNK


@pytest.mark.fast
def test_where_the_cut_is_part_of_the_mathematics_it_stays():
    fast, slow = (Link("dp", 2, "sockets", ((1000, 1e-6), (10**6, seconds))) for seconds in (1e-4, 1.0))
    for option in ("bytegrad", "topk", "diloco", "powersgd", {"name": "hierarchical", "codec": "u8"}):
        assert chunk_bytes(algorithm(option), 10**9, fast) == chunk_bytes(algorithm(option), 10**9, slow), option
    assert chunk_bytes(algorithm({"name": "allreduce", "chunk_bytes": 12345}), 10**9, slow) == 12345


@pytest.mark.fast
def test_departure_worked_by_hand():
    """a (1) with b (3) leave when both are in, c (4) after them: in the order a, b, c at 4/8 and 8/8, in the order b,
    c, a both at 8/8."""
    parameters = [("a", torch.Size([16]), KEY), ("b", torch.Size([48]), KEY), ("c", torch.Size([64]), KEY)]
    cut = assign(parameters, 64 * 4, 4)
    assert [[slot.name for slot in slots] for _, slots in cut] == [["a", "b"], ["c"]]
    assert departure(cut, ["a", "b", "c"]) == (4 * 4 + 4 * 8) / 64
    assert departure(cut, ["b", "c", "a"]) == 1.0
    assert departure(cut, ["a", "b"]) == (4 * 4 + 4 * 8) / 64  # c does not come: it leaves at the end


class Scrambled(nn.Module):
    """Layers registered in another order than that in which they run; the last of them is never used."""

    def __init__(self) -> None:
        super().__init__()
        for number in (3, 7, 0, 5, 2, 8, 6, 1, 4):
            setattr(self, f"layer{number}", nn.Linear(WIDTH, WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for number in range(8):
            inputs = torch.relu(getattr(self, f"layer{number}")(inputs))
        return inputs


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"inputs": torch.randn(WIDTH, generator=generator), "targets": torch.randn(WIDTH, generator=generator)}


def give_a_link(world) -> None:
    """One for which the smallest chunks are best, whatever this machine is busy with."""
    rows = ((1000, 1e-6), (10**6, 2e-3))
    key = tuple(range(world.size)), "cpu"
    links._measured[world.ledger] = {key: Link("dp", world.size, "shared memory", rows)}


def train(world, exchange, optimizer, precision, clip, directory=None) -> tuple[list, dict, list, bool]:
    torch.manual_seed(0)
    give_a_link(world)
    plan = Plan(dp=world.size, exchange=exchange)
    make = partial(
        Engine, Scrambled, regression, optimizer, plan, global_batch=8, precision=precision, clip=clip, world=world
    )
    engine = make(schedule=lambda inner: torch.optim.lr_scheduler.StepLR(inner, 2))
    mine = dict(engine.module.named_parameters())
    numbers = []
    for batch in engine.batches(Rows(), steps=5):
        result = engine.step(batch)
        numbers.append((result.loss, result.grad_norm))
        if directory and result.step == 2:
            engine.save(directory)
    if directory:
        engine.close()
        engine = make(schedule=lambda inner: torch.optim.lr_scheduler.StepLR(inner, 2))
        mine = dict(engine.module.named_parameters())
        engine.load(directory)
        numbers = numbers[:3]
        for batch in engine.batches(Rows(), steps=2):
            result = engine.step(batch)
            numbers.append((result.loss, result.grad_norm))
    same_objects = all(mine[name] is parameter for name, parameter in engine.module.named_parameters())
    weights = {slot.name: slot.view(chunk.master).clone() for chunk in engine.parts.chunks for slot in chunk.slots}
    order = [slot.name for chunk in engine.parts.chunks for slot in chunk.slots]
    engine.close()
    return numbers, weights, order, same_objects


OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "nadam": partial(torch.optim.NAdam, lr=1e-3),  # runs over flat storage, which is laid out anew
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize(
    ("exchange", "optimizer", "precision"),
    [
        ("allreduce", "adamw", "fp32"),
        ("allreduce", "nadam", "bf16"),
        ("allreduce", "nadam", "fp64"),
        ("hierarchical", "sgd", "fp32"),
        ("delayed", "adamw", "bf16"),
        ("local_sgd", "nadam", "fp32"),
        ("decentralized", "sgd", "fp32"),
    ],
)
def test_chunks_go_in_the_order_of_gradients_and_compute_the_same_bits(exchange, optimizer, precision):
    """Against the cut as registered, which a fixed size keeps: losses and weights bit by bit, the parameters the same
    objects. The last bit of the norm, a sum in fp64 over the chunks, may differ; fp64 weights see it where it clips."""
    arguments = (OPTIMIZERS[optimizer], precision, 0.5)
    tuned = run_ranks(train, 2, exchange, *arguments)
    fixed = run_ranks(train, 2, {"name": exchange, "chunk_bytes": 2**20}, *arguments)
    for (numbers, weights, order, same), (wanted, theirs, registered, _) in zip(tuned, fixed, strict=True):
        places = [int(name.removeprefix("layer")[0]) for name in order if name.endswith("weight")]
        assert places == [7, 6, 5, 4, 3, 2, 1, 0, 8] and order != registered and same
        equal(numbers, wanted, precision)
        torch.testing.assert_close(
            weights, theirs, rtol=1e-9 if precision == "fp64" else 0, atol=1e-9 if precision == "fp64" else 0
        )


def equal(numbers, wanted, precision) -> None:
    exact = 1e-9 if precision == "fp64" else 0
    assert [loss for loss, _ in numbers] == pytest.approx([loss for loss, _ in wanted], rel=exact, abs=0)
    assert [norm for _, norm in numbers] == pytest.approx([norm for _, norm in wanted], rel=max(exact, 1e-13), abs=0)


def test_a_run_that_goes_on_computes_the_same_bits(tmp_path):
    """The resumed engine begins with the expected order, though the one before it had found a better one."""
    arguments = (OPTIMIZERS["nadam"], "fp32", 0.5)
    whole = run_ranks(train, 2, "allreduce", *arguments)
    again = run_ranks(train, 2, "allreduce", *arguments, str(tmp_path))
    for (numbers, weights, _, _), (wanted, theirs, _, _) in zip(again, whole, strict=True):
        equal(numbers, wanted, "fp32")
        assert all(torch.equal(weights[name], theirs[name]) for name in weights)


def cut_of_a_chain(world) -> list[str]:
    from shoal.models.mlp import MLP

    give_a_link(world)
    plan = Plan(dp=world.size)
    engine = Engine(lambda: MLP([WIDTH] * 9, "relu"), regression, OPTIMIZERS["sgd"], plan, global_batch=8, world=world)
    before = [id(chunk) for chunk in engine.parts.chunks]
    for batch in engine.batches(Rows(), steps=2):
        engine.step(batch)
    return [len(before), before == [id(chunk) for chunk in engine.parts.chunks]]


def test_a_model_registered_as_it_runs_keeps_its_chunks():
    assert run_ranks(cut_of_a_chain, 2) == [[3, True]] * 2


def kept_gradients(world, exchange) -> tuple[bool, list[dict[str, torch.Tensor]]]:
    """Whether chunks were cut anew after the first step, and the gradients of both steps."""
    give_a_link(world)
    plan = Plan(dp=world.size, exchange=exchange)
    options = {"global_batch": 8, "world": world, "keep_gradients": True}
    engine = Engine(Scrambled, regression, OPTIMIZERS["sgd"], plan, **options)
    before, found = engine.parts.chunks[0], []
    for batch in engine.batches(Rows(), steps=2):
        engine.step(batch)
        found.append(engine.gradients())
    anew = before is not engine.parts.chunks[0]
    engine.close()
    return anew, found


def test_gradients_that_are_kept_outlive_the_cut():
    tuned = run_ranks(kept_gradients, 2, "allreduce")
    fixed = run_ranks(kept_gradients, 2, {"name": "allreduce", "chunk_bytes": 2**20})
    for (anew, found), (stays, wanted) in zip(tuned, fixed, strict=True):
        assert anew and not stays
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
