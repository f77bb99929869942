"""How a global batch is dealt: as evenly as can be where Shoal chooses the microbatch, in whole microbatches where it
is given."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shoal import Engine, Plan
from shoal.comm.simulation import simulate_world
from tests.pool import apart, run_ranks

SAMPLES = [{"x": torch.randn(3, generator=torch.Generator().manual_seed(i)), "n": torch.tensor(i)} for i in range(26)]


def square(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch["x"]).square().sum(), torch.tensor(float(len(batch["x"])))


def dealt(
    world, global_batch: int, plan: dict[str, Any], **more: Any
) -> tuple[list[list[int]], int, list[float], float]:
    """(samples of each forward of the first step, samples of this rank in an evaluation, losses, loss of the
    evaluation)."""
    torch.set_num_threads(1)
    seen: list[list[int]] = []

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        seen.append(batch["n"].tolist())
        return square(model, batch)

    make = partial(torch.optim.SGD, lr=0.1)
    plan = {"dp": world.size, **plan}
    engine = Engine(lambda: nn.Linear(3, 2), loss, make, Plan(**plan), global_batch=global_batch, world=world, **more)
    first, losses = list[list[int]](), []
    for batch in engine.batches(SAMPLES, steps=2):
        losses.append(engine.step(batch).loss)
        if batch.step == 0:
            first = list(seen)
    seen.clear()
    found = engine.evaluate(SAMPLES)
    of_rank = sum(map(len, seen))
    engine.close()
    return first, of_rank, losses, found.loss


@pytest.mark.parametrize(
    ("ranks", "batch", "microbatch", "wanted"),
    [
        (4, 13, None, [[4], [3], [3], [3]]),
        (3, 10, None, [[4], [3], [3]]),
        (4, 3, None, [[1], [1], [1], []]),
        (4, 13, 4, [[4], [4], [4], [1]]),
        (2, 13, 3, [[3, 3, 3], [3, 1]]),
    ],
)
def test_shares_are_as_even_as_can_be(ranks, batch, microbatch, wanted):
    found = simulate_world(ranks, partial(dealt, microbatch=microbatch), batch, {})
    assert [[len(ids) for ids in first] for first, *_ in found] == wanted
    everyone = [i for first, *_ in found for ids in first for i in ids]
    assert len(set(everyone)) == batch
    _, _, losses, evaluated = simulate_world(1, partial(dealt, microbatch=microbatch), batch, {})[0]
    assert found[0][2] == pytest.approx(losses, rel=1e-6) and found[0][3] == pytest.approx(evaluated, rel=1e-6)
    if microbatch is None:
        assert sorted(each for _, each, _, _ in found) == sorted(len(SAMPLES[rank::ranks]) for rank in range(ranks))


def whole(world) -> tuple[list[list[int]], int, list[float], float]:
    return dealt(apart(world), 10, {"zero": 3})


def test_where_ranks_meet_in_forwards_they_have_as_many():
    """Ten samples on three ranks that gather weights in each forward: before, one of them had none, and ran a
    stand-in."""
    found = run_ranks(whole, 3)
    assert [[len(ids) for ids in first] for first, *_ in found] == [[4], [3], [3]]
    assert found[0][2] == pytest.approx(simulate_world(1, dealt, 10, {})[0][2], rel=1e-6)


def islands(world) -> tuple[list[float], list[float]]:
    torch.set_num_threads(1)
    option = {"name": "islands", "ranks": 2, "across": {"name": "local_sgd", "every": 100}}
    engine = Engine(
        lambda: nn.Linear(3, 2),
        square,
        partial(torch.optim.SGD, lr=0.1),
        Plan(dp=4, exchange=option),
        global_batch=13,
        world=world,
    )
    results = [engine.step(batch) for batch in engine.batches(SAMPLES, steps=1)]
    engine.close()
    return [result.share for result in results], [result.tokens for result in results]


def test_the_share_of_an_island_is_what_its_ranks_have():
    assert [share for share, _ in simulate_world(4, islands)] == [[7 / 13]] * 2 + [[6 / 13]] * 2


def apart_then_mean(world, option: Any, batch: int) -> torch.Tensor:
    torch.set_num_threads(1)
    make = partial(torch.optim.SGD, lr=0.1)
    engine = Engine(
        lambda: nn.Linear(3, 2), square, make, Plan(dp=world.size, exchange=option), global_batch=batch, world=world
    )
    for each in engine.batches(SAMPLES, steps=3):
        engine.step(each)
    weights = torch.cat([value.detach().flatten() for value in engine.parameters.values()])
    engine.close()
    return weights


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(
    "option",
    [
        {"name": "local_sgd", "every": 1},
        {"name": "diloco", "every": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "guard": 0.0},
    ],
    ids=["local_sgd", "diloco"],
)
def test_replicas_that_train_apart_weigh_by_what_they_counted(option, across):
    """Under SGD the mean after each step is then the step of one process: of five samples on two replicas, and of three
    on four, of which one has none."""
    chosen = {"name": "islands", "ranks": 2, "across": option} if across else option
    for ranks, batch in ((4 if across else 2, 5), (4, 3)):
        wanted = simulate_world(1, apart_then_mean, "allreduce", batch)[0]
        for got in simulate_world(ranks, apart_then_mean, chosen, batch):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
