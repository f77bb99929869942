"""Groups: results worked by hand, tensors of any strides, sub-groups, and errors that name the missing."""

from __future__ import annotations

import pytest
import torch

from shoal.comm import Group, World
from shoal.comm.alone import Alone
from shoal.comm.emulate import simulate
from shoal.comm.functional import copy_to, reduce_from
from shoal.errors import LaunchError, UserError
from tests.comm.operations import differing, every_operation, expected
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
        "conjugate": group.all_reduce(torch.tensor([1 + 2j]).conj()).tolist(),  # which torch has not computed yet
        "object": group.broadcast_object(["from", world.rank], 2),
        "long": [len(each) for each in group.all_gather_object("y" * 600 * world.rank)],
        "long object": len(group.broadcast_object("z" * 1000 if world.rank == 1 else None, 1)),
        "calls": world.ledger.total("world", "all_reduce").calls,
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
            "conjugate": [3 - 6j],
            "object": ["from", 2],
            "long": [0, 600, 1200],
            "long object": 1000,
            "calls": 5,
        }


def strided(group: Group) -> dict[str, list]:
    """Operations on every second element, on a transposed matrix, on a scalar and on a leaf that wants a gradient."""
    rank, size = group.rank, group.size
    row = torch.arange(4.0)
    matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    parts, gathered, turned = torch.zeros(2), torch.zeros(2 * size), torch.zeros(2, size)
    leaf = torch.nn.Parameter(torch.tensor([float(rank)]))
    group.all_reduce(row[::2])
    group.broadcast(matrix.T if rank == 0 else matrix, 0)
    group.reduce_scatter(parts[1:], torch.arange(2.0 * size)[::2], op="avg")
    group.all_gather(gathered[::2], torch.tensor(float(rank)))
    group.exchange(turned.T[1], (rank - 1) % size, torch.arange(2.0 * rank, 2.0 * rank + 2), (rank + 1) % size)
    return {
        "every second": row.tolist(),
        "transposed": matrix.tolist(),
        "parts": parts.tolist(),
        "gathered": gathered.tolist(),
        "turned": turned.tolist(),
        "leaf": [group.broadcast(leaf, 1).item(), leaf.requires_grad],
        "scalar": group.all_reduce(torch.tensor(float(rank))).tolist(),
    }


@pytest.mark.fast
def test_tensors_of_any_shape_and_strides():
    """Rank 0 sends its matrix's transpose, so itself keeps [[1, 2], [3, 4]]."""
    first, second = simulate(2, strided)
    assert first == {
        "every second": [0, 1, 4, 3],
        "transposed": [[1, 2], [3, 4]],
        "parts": [0, 0],
        "gathered": [0, 0, 1, 0],
        "turned": [[0, 2], [0, 3]],
        "leaf": [1, True],
        "scalar": 1,
    }
    assert second == first | {"transposed": [[1, 3], [2, 4]], "parts": [0, 2], "turned": [[0, 0], [0, 1]]}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: g.all_reduce(torch.ones(1), "median"), UserError, "no reduction 'median'; take one of sum, avg"),
        (lambda g: g.reduce_scatter(torch.ones(2), torch.ones(3)), ValueError, "must have 1 x 2 = 2"),
        (lambda g: g.all_gather(torch.ones(3), torch.ones(2)), ValueError, "the whole has 3 elements, a rank's cut 2"),
        (lambda g: g.scatter(torch.ones(2), None), ValueError, "the whole has 0 elements"),
        (
            lambda g: g.all_to_all(torch.ones(2), torch.ones(2), [1], [2]),
            ValueError,
            r"out_splits \[1\] must be 1 counts that add up",
        ),
    ],
)
def test_what_does_not_fit_is_said(call, error, message):
    with pytest.raises(error, match=message):
        call(Group.of(Alone()))


def test_an_all_to_all_that_is_not_even_asks_for_splits():
    with pytest.raises(ValueError, match="3 elements over 2 ranks is not even: give out_splits"):
        simulate(2, lambda group: group.all_to_all(torch.ones(3), torch.ones(3)))


@pytest.mark.fast
def test_every_operation_of_a_group_of_one():
    group = Group.of(Alone())
    assert differing(every_operation(group, torch.float32, 5), expected(0, 1, torch.float32, 5)) == []
    assert group.ledger.total().wire == 0 and group.ledger.total().calls > 10
    for call in (lambda: group.send(torch.ones(1), 0), lambda: group.recv(torch.ones(1), 0)):
        with pytest.raises(LaunchError, match="a group of one rank has nobody"):
            call()


def with_itself(world) -> list[float]:
    """An exchange in which the odd one of three ranks is its own partner."""
    partner = {0: 1, 1: 0, 2: 2}[world.rank]
    return world.everyone.exchange(torch.zeros(1), partner, torch.tensor([float(world.rank)]), partner).tolist()


def test_a_rank_may_exchange_with_itself():
    assert run_ranks(with_itself, 3) == [[1], [0], [2]]


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


def messages_then_a_loss(world):
    """Ranks 0 and 2 exchange alone; then rank 1 is lost, and rank 2 hears nothing from it."""
    import os

    group = world.everyone
    if world.rank != 1:
        group.exchange(torch.zeros(1), 2 - world.rank, torch.ones(1), 2 - world.rank)
    group.barrier()
    if world.rank == 1:
        os._exit(9)
    try:
        group.recv(torch.zeros(1), 1, "boundary") if world.rank == 2 else group.barrier()
    except LaunchError as error:
        return str(error)


def test_messages_are_not_numbered_and_call_no_roll():
    with disposable_ranks(messages_then_a_loss, 3) as ranks:
        barrier, message = ranks[0].result(), ranks[2].result()
    assert "rank 0: collective 2 of group world, barrier, failed" in barrier and "rank 1" in barrier
    assert "rank 2: in group world, recv (boundary), failed after" in message
    assert "not there" not in message and "rank 1 has ended" in message


def derivatives(world):
    """f(w) = reduce(sum_r (r + 1) w^3): gradient 3 w^2 S, second derivative 6 w S, with S the sum over ranks of r +
    1."""
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
