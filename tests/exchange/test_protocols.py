"""Each algorithm against its formula, worked by hand or by a plain loop."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from torch import Tensor

from shoal.chunks import Slot
from shoal.comm import Group
from shoal.comm.codecs import codec
from shoal.comm.emulate import simulate
from shoal.comm.simulation import simulate_world
from shoal.exchange.adasum import adasum
from shoal.exchange.decentralized import partner
from shoal.exchange.scatter_gather import cuts_of, scatter_gather
from shoal.exchange.topk import TopK
from tests.exchange.teacher import ADAMW, data, engine, regression, train


def draws(rank: int, numel: int, round_: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * round_ + rank))


# ----------------------------------------------------------------------------------------------------------------
# scatter-gather


@pytest.mark.parametrize(("numel", "size"), [(0, 3), (1, 2), (1024, 2), (5000, 2), (5000, 3), (4096, 4)])
def test_cuts_cover_everything_at_multiples_of_a_row(numel, size):
    cuts = cuts_of(numel, size)
    assert len(cuts) == size
    assert [i for cut in cuts for i in range(cut.start, cut.stop)] == list(range(numel))
    assert all(cut.start % 1024 == 0 or cut.start == numel for cut in cuts)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_error_feedback_keeps_is_what_was_not_sent(size):
    """sum of what all applied + residuals of all = sum of what all gave, over ten rounds."""
    numel = 5000

    def run(group: Group) -> tuple[Tensor, Tensor, Tensor]:
        own, summed, applied = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel, dtype=torch.float64)
        for round_ in range(10):
            flat = draws(group.rank, numel, round_)
            scatter_gather(flat, group, codec("sign"), "test", own, summed)
            applied += flat
        return applied, own, summed

    results = simulate(size, run)
    given = sum(draws(rank, numel, round_).double() for rank in range(size) for round_ in range(10))
    kept = sum(own.double() + summed.double() for _, own, summed in results)
    torch.testing.assert_close(results[0][0] + kept, given, rtol=0, atol=1e-4)
    assert kept.abs().max() > 1, "one bit an element loses a lot a round"
    for rank, (applied, _, summed) in enumerate(results):
        assert torch.equal(applied, results[0][0])
        mine = cuts_of(numel, size)[rank]
        assert not summed[: mine.start].any() and not summed[mine.stop :].any(), (
            "a rank keeps what it lost of its own cut"
        )


def test_a_gradient_that_is_not_finite_is_seen_by_all():
    def run(group: Group, name: str) -> bool:
        flat = draws(group.rank, 3000)
        if group.rank == 1:
            flat[2500] = float("nan")
        scatter_gather(flat, group, codec(name), "test")
        return bool(torch.isfinite(torch.linalg.vector_norm(flat)))

    for name in ("u8", "u4", "sign", "fp16", "bf16"):
        assert simulate(3, run, name) == [False, False, False], name


def test_a_gradient_that_is_not_finite_does_not_stay_in_the_residuals():
    def run(group: Group) -> list[bool]:
        own, summed = torch.zeros(3000), torch.zeros(3000)
        seen = []
        for round_ in range(2):
            flat = draws(group.rank, 3000, round_)
            if group.rank == 1 and round_ == 0:
                flat[2500] = float("nan")
            scatter_gather(flat, group, codec("u8"), "test", own, summed)
            seen.append(bool(torch.isfinite(flat).all()))
        return seen

    assert simulate(2, run) == [[False, True]] * 2


def test_bytes_on_the_wire_are_the_formula():
    """u8: 1/4 of the ring's bytes, and 8 a row of 1024."""
    numel, size = 8 * 1024, 4

    def run(group: Group) -> int:
        scatter_gather(draws(group.rank, numel), group, codec("u8"), "test")
        return group.ledger.total().wire

    encoded = codec("u8").encoded_bytes(2048)
    assert encoded == 2 * (1024 + 8)
    assert simulate(size, run) == [2 * 3 * encoded] * size


# ----------------------------------------------------------------------------------------------------------------------
# adasum


def reference(vectors: list[list[Tensor]]) -> list[Tensor]:
    """The recursion on whole vectors, a parameter at a time."""

    def pair(a: Tensor, b: Tensor) -> Tensor:
        ab, aa, bb = (float(x.double() @ y.double()) for x, y in ((a, b), (a, a), (b, b)))
        return a * (1 - ab / (2 * aa) if aa else 1.0) + b * (1 - ab / (2 * bb) if bb else 1.0)

    paired = 1 << (len(vectors).bit_length() - 1)
    level = [
        [pair(a, b) for a, b in zip(v, vectors[i + paired], strict=True)] if i + paired < len(vectors) else v
        for i, v in enumerate(vectors[:paired])
    ]
    while len(level) > 1:
        level = [[pair(a, b) for a, b in zip(x, y, strict=True)] for x, y in zip(level[::2], level[1::2], strict=True)]
    return level[0]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 8])
def test_adasum_is_its_recursion(size):
    slots = (Slot("a", torch.Size([7, 3]), 0), Slot("b", torch.Size([5]), 32), Slot("c", torch.Size([40]), 48))

    def flat_of(rank: int) -> Tensor:
        flat = torch.zeros(88)
        for slot in slots:
            slot.view(flat).copy_(draws(rank, slot.numel, slot.offset).view(slot.shape))
        if rank == 0:
            flat[32:37] = 0  # a parameter that this rank did not touch
        return flat

    def run(group: Group) -> Tensor:
        flat = flat_of(group.rank)
        adasum(flat, slots, group, "test")
        return flat

    wanted = reference([[slot.view(flat_of(rank)).flatten() for slot in slots] for rank in range(size)])
    for flat in simulate(size, run):
        for slot, value in zip(slots, wanted, strict=True):
            torch.testing.assert_close(slot.view(flat).flatten(), value, rtol=1e-5, atol=1e-6)


def test_adasum_averages_what_agrees_and_adds_what_is_orthogonal():
    slots = (Slot("a", torch.Size([2]), 0),)

    def run(group: Group, given: list[list[float]]) -> list[float]:
        flat = torch.tensor(given[group.rank])
        adasum(flat, slots, group, "test")
        return flat.tolist()

    assert simulate(2, run, [[3.0, 4.0], [3.0, 4.0]])[0] == [3.0, 4.0]
    assert simulate(2, run, [[3.0, 0.0], [0.0, 4.0]])[0] == [3.0, 4.0]


# ---------------------------------------------------------------------------------------------------------------
# decentralized


@pytest.mark.parametrize("size", range(2, 9))
def test_partners_are_mutual_and_everyone_meets_everyone(size):
    rounds = size - 1 + size % 2
    met = {rank: [partner(rank, size, round_) for round_ in range(rounds)] for rank in range(size)}
    for rank, others in met.items():
        for round_, other in enumerate(others):
            assert partner(other, size, round_) == rank
        resting = [rank] if size % 2 else []
        assert sorted(others) == sorted(set(range(size)) - {rank} | set(resting)), (
            f"rank {rank} meets each once, rests if they are odd"
        )


@pytest.mark.parametrize(("peers", "size"), [("all", 3), ("shift_one", 3), ("shift_one", 4)])
def test_gossip_leaves_the_mean_of_the_weights_alone(peers, size):
    """With lr 0 after some steps of training apart, mixing changes each replica and not their mean."""

    def run(world) -> tuple[Tensor, Tensor]:
        torch.set_num_threads(1)
        running = engine(world, {"name": "decentralized", "peers": peers, "every": 5})
        weights = partial(torch.cat, [chunk.master for chunk in running.parts.chunks])
        before = None
        for batch in running.batches(data(), steps=6):
            if batch.step == 5:
                before = weights().clone()
                for group in running.optimizer.torch.param_groups:
                    group["lr"] = 0.0
            running.step(batch)
        running.close()
        return before, weights()

    results = simulate_world(size, run)
    assert any(not torch.allclose(before, after, atol=1e-4) for before, after in results)
    torch.testing.assert_close(
        torch.stack([after for _, after in results]).mean(0),
        torch.stack([before for before, _ in results]).mean(0),
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_ring_knows_its_neighbours_replicas_bit_by_bit(size):
    def run(world):
        torch.set_num_threads(1)
        running = engine(world, "low_precision_decentralized")
        seen = []
        for batch in running.batches(data(), steps=5):
            running.step(batch)
            exchange = running.parts.exchange
            seen.append([torch.cat(flats) for flats in (exchange._own, exchange._of_left, exchange._of_right)])
        running.close()
        return seen

    results = simulate_world(size, run)
    for step in range(5):
        for rank in range(size):
            _own, left, right = results[rank][step]
            assert torch.equal(left, results[rank - 1][step][0])
            assert torch.equal(right, results[(rank + 1) % size][step][0])


# -----------------------------------------------------------------------------------------------------------------
# local steps


def test_diloco_with_one_step_and_no_momentum_is_parameter_averaging():
    outer = {"name": "diloco", "every": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "guard": 0.0}
    for ours, averaged in zip(
        simulate_world(3, train, outer, 12),
        simulate_world(3, train, {"name": "local_sgd", "every": 1}, 12),
        strict=True,
    ):
        for name, value in averaged.weights.items():
            torch.testing.assert_close(ours.weights[name], value, rtol=0, atol=1e-5)


def test_diloco_s_outer_step_is_torch_s_sgd_with_nesterov():
    """One replica: the outer optimizer alone. Its gradient is what `every` inner steps moved, backwards."""

    def run(world) -> list[Tensor]:
        torch.set_num_threads(1)
        running = engine(world, {"name": "diloco", "every": 3, "codec": "fp32", "guard": 0.0})
        anchor = torch.nn.Parameter(torch.cat([chunk.master for chunk in running.parts.chunks]).clone())
        outer = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)
        pairs = []
        for batch in running.batches(data(), steps=9):
            exchange = running.parts.exchange
            end, inner = exchange.end, []

            def watched(step: int, end=end, inner=inner) -> None:
                inner.append(torch.cat([chunk.master for chunk in running.parts.chunks]).clone())
                end(step)

            exchange.end = watched
            running.step(batch)
            exchange.end = end
            if (batch.step + 1) % 3 == 0:
                anchor.grad = anchor.detach() - inner[0]
                outer.step()
                pairs.append(
                    (anchor.detach().clone(), torch.cat([chunk.master for chunk in running.parts.chunks]).clone())
                )
        running.close()
        return pairs

    for wanted, got in simulate_world(1, run)[0]:
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_the_guard_of_diloco_drops_the_outer_momentum_where_replicas_run_away():
    """An inner SGD with momentum and a high learning rate diverges with the outer momentum, and learns without."""
    inner = partial(torch.optim.SGD, lr=0.25, momentum=0.9)
    outer = {"name": "diloco", "every": 8, "outer_lr": 0.7, "codec": "fp32"}
    with pytest.warns(UserWarning, match="the outer momentum is dropped"):
        guarded = simulate_world(2, partial(train, clip=None), {**outer, "guard": 1.5}, 96, inner)[0].evaluation
    unguarded = simulate_world(2, partial(train, clip=None), {**outer, "guard": 0.0}, 96, inner)[0].evaluation
    assert guarded < unguarded


def test_delayed_gradients_are_those_of_the_weights_a_step_before():
    def by_hand(world) -> list[Tensor]:
        running = engine(world, "allreduce", partial(torch.optim.SGD, lr=0.1), clip=None)
        weights = {name: parameter.detach().clone() for name, parameter in running.parameters.items()}
        parameters, waiting = list(running.parameters.values()), None
        for batch in running.batches(data(), steps=8):
            loss = sum(
                regression(running.module, batch.load(batch.ids[at : at + 2]))[0] for at in range(0, len(batch.ids), 2)
            ) / (4 * len(batch.ids))
            fresh = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, waiting or [], strict=False):
                    parameter.sub_(gradient, alpha=0.1)
            waiting, running.step_index = fresh, running.step_index + 1
        assert any(not torch.equal(weights[name], parameter) for name, parameter in running.parameters.items())
        return [parameter.detach().clone() for parameter in parameters]

    wanted = simulate_world(1, by_hand)[0]
    for size in (1, 2):
        got = simulate_world(size, partial(train, clip=None), "delayed", 8, partial(torch.optim.SGD, lr=0.1))[0]
        for value, weight in zip(wanted, got.weights.values(), strict=True):
            torch.testing.assert_close(weight, value, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------- Adam,
# compressed


@pytest.mark.parametrize(
    "optimizer", [partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1), partial(ADAMW, weight_decay=0.1)]
)
def test_qadam_without_loss_is_adam_with_a_frozen_variance(optimizer):
    """fp32 on the wire, no feedback: m = mean of the replicas' momenta, x -= lr m' / (sqrt(v frozen / (1 - b2^T)) +
    eps)."""

    def by_hand(world) -> dict[str, Tensor]:
        torch.set_num_threads(1)
        running = engine(world, "allreduce", optimizer, clip=None)
        adam, (beta1, beta2), warmup, lr = running.optimizer.torch, (0.9, 0.999), 4, 1e-2
        decoupled = isinstance(adam, torch.optim.AdamW)
        for batch in running.batches(data(), steps=12):
            if batch.step < warmup:
                running.step(batch)
                continue
            parameters = list(running.parameters.values())
            loss = sum(
                regression(running.module, batch.load(batch.ids[at : at + 2]))[0] for at in range(0, len(batch.ids), 2)
            ) / (4 * len(batch.ids))
            for x, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                state = adam.state[x]
                with torch.no_grad():
                    g = g if decoupled else g + 0.1 * x
                    x.mul_(1 - lr * 0.1) if decoupled else None
                    state["exp_avg"].mul_(beta1).add_((1 - beta1) * g)
                    corrected = state["exp_avg"] / (1 - beta1 ** (batch.step + 1))
                    x.sub_(lr * corrected / ((state["exp_avg_sq"] / (1 - beta2**warmup)).sqrt() + 1e-8))
            running.step_index += 1
        return {name: parameter.detach().clone() for name, parameter in running.parameters.items()}

    wanted = simulate_world(1, by_hand)[0]
    plain = {"name": "qadam", "warmup": 4, "codec": "fp32", "error_feedback": False}
    for size in (1, 2, 3):
        got = simulate_world(size, partial(train, clip=None), plain, 12, optimizer)[0]
        for name, value in wanted.items():
            torch.testing.assert_close(got.weights[name], value, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------------ the
# others


def test_powersgd_of_full_rank_is_the_exact_sum():
    full = {"name": "powersgd", "rank": 24, "min_compression": 0.1, "start": 0}
    losses = simulate_world(2, train, full, 12)[0].losses
    assert losses == pytest.approx(simulate_world(1, train, "allreduce", 12)[0].losses, rel=1e-3)


def test_topk_sends_everything_in_the_end():
    """Constant gradients: after enough rounds what was applied and what waits add up."""

    def run(world) -> tuple[Tensor, Tensor]:
        running = engine(world, {"name": "topk", "ratio": 0.1})
        exchange, chunk = running.parts.exchange, running.parts.chunks[0]
        assert isinstance(exchange, TopK)
        applied = torch.zeros(chunk.size)
        for _ in range(30):
            chunk.gradient.copy_(draws(world.rank, chunk.size))
            exchange.reduce(chunk, torch.ones(()))
            applied += chunk.gradient
        running.close()
        return applied, exchange._residual[0], 30 * draws(world.rank, chunk.size)

    results = simulate_world(3, run)
    torch.testing.assert_close(
        results[0][0] + sum(residual for _, residual, _ in results),
        sum(given for _, _, given in results),
        rtol=0,
        atol=1e-3,
    )


# ----------------------------------------------------------------------------------------------------------------
# asynchronous


def slow_on_rank_one(world, steps_of_fast: int) -> tuple[float, int, Tensor]:
    """Rank 1 takes 20 ms longer for a step; each trains its own number of steps."""
    torch.set_num_threads(1)
    running = engine(world, {"name": "async_average", "interval_ms": 2, "bound": 1000})
    started, steps = time.monotonic(), steps_of_fast if world.rank == 0 else steps_of_fast // 10
    for batch in running.batches(data(), steps=steps):
        if world.rank == 1:
            time.sleep(0.02)
        running.step(batch)
    seconds = time.monotonic() - started
    running.parts.exchange.settle()
    rounds = running.ledger.total("dp-async", "all_reduce", "weights").calls
    weights = torch.cat([chunk.master for chunk in running.parts.chunks]).clone()
    running.close()
    return seconds, rounds, weights


def test_nobody_waits_for_a_slow_replica():
    (_, rounds, fast), (_, others, slow) = simulate_world(2, slow_on_rank_one, 40)
    assert rounds == others >= 4, "rounds went on meanwhile, the same on both"
    assert torch.isfinite(fast).all() and torch.isfinite(slow).all()


def test_a_replica_waits_when_the_bound_is_reached():
    def run(world) -> int:
        torch.set_num_threads(1)
        running = engine(world, {"name": "async_average", "interval_ms": 0, "bound": 3})
        for batch in running.batches(data(), steps=12):
            if world.rank == 1:
                time.sleep(0.03)
            running.step(batch)
            if world.rank == 0 and running.parts.exchange._started is not None:
                assert batch.step - running.parts.exchange._started <= 3
        running.parts.exchange.settle()
        running.close()
        return running.ledger.total("dp-async", "all_reduce", "weights").calls

    fast, slow = simulate_world(2, run)
    assert fast == slow


# --------------------------------------------------------------------------------------------------------------------
# islands


def test_an_island_updates_as_one_and_meets_the_others_as_one():
    """Two islands of two equal two replicas of one rank that each take half of the batch."""
    outer = {"name": "local_sgd", "every": 3}
    islands = simulate_world(4, train, {"name": "islands", "ranks": 2, "inside": "allreduce", "across": outer}, 8)
    alone = simulate_world(2, train, outer, 8)
    assert islands[0].losses == islands[1].losses and islands[2].losses == islands[3].losses
    option = {"name": "islands", "ranks": 2, "inside": "allreduce", "across": outer}
    clipped = simulate_world(2, partial(train, clip_value=1e-3), option, 8)[0]
    of_all = simulate_world(2, partial(train, clip_value=1e-3), "allreduce", 8)[0]
    assert clipped.losses == pytest.approx(of_all.losses, rel=1e-5), "the one island there is clips as a run without"
    for of_island, of_one in ((islands[0], alone[0]), (islands[3], alone[1])):
        assert of_island.losses == pytest.approx(of_one.losses, rel=1e-5)
        for name, value in of_one.weights.items():
            torch.testing.assert_close(of_island.weights[name], value, rtol=1e-4, atol=1e-6)
