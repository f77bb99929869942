"""Groups on gloo: results worked by hand, sub-groups, generations, and errors that name the missing."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from shoal.comm import Lane, World
from shoal.comm.functional import copy_to, reduce_from
from shoal.errors import LaunchError
from tests.pool import disposable_ranks, run_ranks


def every_collective(world):
    group, mine = world.everyone, torch.tensor([1.0, 2.0]) * (world.rank + 1)
    gathered = group.all_gather(torch.empty(2 * world.size), mine)
    part = group.reduce_scatter(torch.empty(1), torch.arange(world.size, dtype=torch.float32) + world.rank)
    reduced = {op: group.all_reduce(mine.clone(), op).tolist() for op in ("sum", "min", "max", "product")}
    objects = group.all_gather_object({"rank": world.rank, "text": "x" * world.rank})
    group.barrier()
    return {
        "gathered": gathered.tolist(),
        "part": part.item(),
        **reduced,
        "broadcast": group.broadcast(mine.clone(), 1).tolist(),
        "objects": [(entry["rank"], len(entry["text"])) for entry in objects],
        "object": group.broadcast_object(["from", world.rank], 2),
        "calls": world.ledger.calls["world", "all_reduce"],
    }


@pytest.mark.fast
def test_every_collective_on_three_ranks():
    """Rank r holds [1, 2] (r + 1); rank r's piece of the scattered sum of [r, r+1, r+2] is 0+1+2 + 3 r."""
    for rank, result in enumerate(run_ranks(every_collective, 3)):
        assert result == {
            "gathered": [1, 2, 2, 4, 3, 6],
            "part": 3 + 3 * rank,
            "sum": [6, 12],
            "min": [1, 2],
            "max": [3, 6],
            "product": [6, 48],
            "broadcast": [2, 4],
            "objects": [(0, 0), (1, 1), (2, 2)],
            "object": ["from", 2],
            "calls": 5,  # four reductions and the barrier
        }


def pairs(world):
    ranks = [world.rank // 2 * 2, world.rank // 2 * 2 + 1]
    group = world.group("pair", ranks)
    assert world.group("pair", ranks) is group
    return group.all_reduce(torch.tensor([float(world.rank)])).item(), group.rank


def test_groups_of_some_ranks():
    assert run_ranks(pairs, 4) == [(1, 0), (1, 1), (5, 0), (5, 1)]


@pytest.mark.fast
def test_a_group_of_one_needs_no_store():
    group = World.single("cpu").everyone
    x = torch.tensor([3.0])
    assert group.all_reduce(x) is x and group.broadcast_object("a") == "a" and group.all_gather_object(1) == [1]
    assert group.all_gather(torch.empty(1), x).item() == 3 and group.reduce_scatter(torch.empty(1), x).item() == 3


def leave_then_reduce(world):
    world.everyone.barrier()
    if world.rank == 1:
        import os

        os._exit(9)
    try:
        world.everyone.all_reduce(torch.ones(4), purpose="gradients 7")
    except LaunchError as error:
        return str(error)


def test_a_collective_that_fails_names_what_and_who():
    with disposable_ranks(leave_then_reduce, 3) as ranks:
        message = ranks[0].result()
    assert "rank 0: collective 2 of group world, all_reduce (gradients 7), failed after" in message
    assert "not there: rank 1" in message


class TestLane:
    def test_work_runs_in_order_beside_the_caller(self):
        lane, seen = Lane(torch.device("cpu")), []
        for i in range(50):
            lane.submit(lambda i=i: seen.append((i, threading.current_thread().name)))
        lane.wait()
        assert seen == [(i, "shoal-lane") for i in range(50)]
        lane.close()

    def test_wait_waits(self):
        lane, seen = Lane(torch.device("cpu")), []
        lane.submit(lambda: (time.sleep(0.1), seen.append(1)))
        assert seen == []
        lane.wait()
        assert seen == [1]
        lane.close()

    def test_the_first_error_is_raised_once_and_what_followed_it_is_dropped(self):
        lane, seen = Lane(torch.device("cpu")), []

        def fail():
            raise KeyError("first")

        lane.submit(fail)
        lane.submit(lambda: seen.append("dropped"))
        with pytest.raises(KeyError, match="first"):
            lane.wait()
        lane.submit(lambda: seen.append("next"))
        lane.wait()
        assert seen == ["next"]
        lane.close()


def derivatives(world):
    """f(w) = reduce(sum_r (r + 1) w^3): gradient 3 w^2 S, second derivative 6 w S, with S the sum over ranks of r + 1."""
    group = world.everyone

    def f(w):
        return reduce_from((world.rank + 1) * copy_to(w, group) ** 3, group)

    w = torch.tensor(2.0, dtype=torch.float64)
    one = torch.ones_like(w)
    first = torch.func.grad(f)(w)
    return (
        f(w).item(),
        first.item(),
        torch.func.jvp(f, (w,), (one,))[1].item(),
        torch.func.jvp(torch.func.grad(f), (w,), (one,))[1].item(),
        torch.func.grad(torch.func.grad(f))(w).item(),
    )


@pytest.mark.fast
def test_derivatives_of_every_order_pass_through_the_collectives():
    assert run_ranks(derivatives, 3) == [(48, 72, 72, 72, 72)] * 3
