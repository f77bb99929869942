"""Ranks with unequal numbers of steps: join in loops that the caller owns, and settle where replicas need not be at the
same step."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shoal import Engine, Plan, UserError
from shoal.comm import World
from shoal.errors import LaunchError
from shoal.models import GPT, GPTConfig
from shoal.training.loop import callers_loss
from tests.exchange.teacher import data, engine
from tests.pool import apart, run_ranks

HAS = [5, 3, 0]
"""Microbatches of each rank."""


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def microbatch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + number))
    return x, x[:, :1] * x[:, 1:2]


def make(world: World, plan: Plan, **more: Any) -> Engine:
    optimizer = partial(torch.optim.AdamW, lr=0.02)
    return Engine(
        net, callers_loss, optimizer, plan, global_batch=4 * world.size, microbatch=4, clip=1.0, world=world, **more
    )


def uneven(world: World, exchange: Any, zero: int, accumulate: int) -> tuple[dict[str, torch.Tensor], int]:
    torch.set_num_threads(1)
    running = make(world, Plan(dp=world.size, exchange=exchange, zero=zero))
    loop = running.loop(accumulate)
    with loop.join():
        for number in range(HAS[world.rank]):
            x, y = microbatch(world.rank, number)
            loop.backward((loop(x) - y).square().mean())
            loop.step()
    world.everyone.barrier()
    state = {name: value.detach().clone() for name, value in running.module.state_dict().items()}
    steps = running.step_index
    running.close()
    return state, steps


def union(accumulate: int) -> dict[str, torch.Tensor]:
    """One process that is fed the microbatches of all ranks, in their order."""
    world = World.single(device="cpu")
    running = make(world, Plan())
    model = net()  # an engine takes the gradients of its own
    model.load_state_dict(running.module.state_dict())
    running.close()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for start in range(0, max(HAS), accumulate):
        there = [(rank, n) for rank, has in enumerate(HAS) for n in range(start, min(start + accumulate, has))]
        for rank, number in there:
            x, y = microbatch(rank, number)
            ((model(x) - y).square().mean() / len(there)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("exchange", "zero", "accumulate"),
    [
        ("allreduce", 0, 1),
        ("allreduce", 2, 2),
        ({"name": "powersgd", "rank": 8, "start": 0, "min_compression": 0.1}, 0, 1),
    ],
    ids=str,
)
def test_a_rank_without_data_answers_with_zeros(exchange, zero, accumulate):
    """BatchNorm's statistics included. Of the second accumulation of two rank 1 has one microbatch."""
    wanted = union(accumulate)
    for state, steps in run_ranks(uneven, 3, exchange, zero, accumulate):
        assert steps == -(-max(HAS) // accumulate)
        for name, value in wanted.items():
            torch.testing.assert_close(
                state[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


def meets(world: World) -> None:
    running = Engine(
        lambda: nn.Linear(6, 1), callers_loss, partial(torch.optim.SGD, lr=0.1), Plan(dp=2, zero=3), global_batch=8,
        microbatch=4, world=apart(world),
    )  # fmt: skip
    with pytest.raises(UserError, match=r"join\(\): ranks meet in their forwards"), running.loop().join():
        raise AssertionError("not refused")
    running.close()


def test_join_is_refused_where_ranks_meet_in_forwards():
    run_ranks(meets, 2)


def no_loop(world: World, plan: dict[str, Any]) -> None:
    model = partial(GPT, GPTConfig(vocab_size=11, sequence=4, layers=2, d_model=8, heads=2))
    running = Engine(
        model, callers_loss, partial(torch.optim.SGD, lr=0.1), Plan(**plan), global_batch=8, microbatch=4, world=world
    )
    with pytest.raises(UserError, match=rf"plan\.{next(iter(plan))} > 1 .*not with a loop of your own"):
        running.loop()
    running.close()


@pytest.mark.parametrize("plan", [{"pp": 2}, {"cp": 2}], ids=str)
def test_loops_and_so_join_are_refused_where_the_engine_shares_out_what_a_forward_is_of(plan):
    run_ranks(no_loop, 2, plan)


def pairs(world: World) -> tuple[dict[str, torch.Tensor], int]:
    """As `uneven`, of a model that is cut between two ranks: both of a replica have the same microbatches."""
    torch.set_num_threads(1)
    rank = world.rank // 2
    layers = {"0": "column", "2": "row"}
    running = Engine(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), callers_loss,
        partial(torch.optim.SGD, lr=0.1), Plan(dp=2, tp=2), global_batch=8, microbatch=4, world=world,
        tensor_rules=layers, seed=1,
    )  # fmt: skip
    loop = running.loop()
    with loop.join():
        for number in range([3, 1][rank]):
            x, y = microbatch(rank, number)
            loop.backward((loop(x) - y).square().mean())
            loop.step()
    found = {name: value.detach().clone() for name, value in running.module.state_dict().items()}, running.step_index
    running.close()
    return found


def test_replicas_of_a_cut_model_join():
    ranks = run_ranks(pairs, 4)
    for place in (0, 1):
        one, other = ranks[place], ranks[place + 2]
        assert one[1] == other[1] == 3
        for name, value in one[0].items():
            assert torch.equal(other[0][name], value), name


def unequal(world: World, settles: bool, first: int) -> str:
    """Rank 0 makes `first` steps, rank 1 twenty, which is beyond the bound; then both meet in a barrier."""
    torch.set_num_threads(1)
    world.timeout = timedelta(seconds=60 if settles else 2)
    running = engine(world, {"name": "async_average", "interval_ms": 0, "bound": 3})
    said = ""
    try:
        for batch in running.batches(data(), steps=20 if world.rank else first):
            running.step(batch)
        if settles:
            running.settle()
            world.everyone.barrier()
        elif world.rank == 0:
            world.store.get("said")  # as if it waited for rank 1 in a collective of the program's
    except LaunchError as error:
        said = str(error)
        world.store.set("said", said)
    finally:
        running.close()
    return said


@pytest.mark.parametrize("first", [1, 4])
def test_after_settle_ranks_meet(first):
    assert run_ranks(unequal, 2, True, first, timeout=40) == ["", ""]


def test_without_it_the_message_names_the_cause_and_the_remedy():
    said = run_ranks(unequal, 2, False, 4, timeout=40)[1]
    assert "async_average" in said and "engine.settle()" in said and "bound" in said, said
