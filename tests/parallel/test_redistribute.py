"""Every pair of placements against brute force, its gradients and tangents, and what the ways cost."""

from __future__ import annotations

from functools import cache
from itertools import pairwise, permutations, product
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shoal import Plan
from shoal.comm import World
from shoal.mesh import Mesh
from shoal.parallel.groups import MeshGroups, measured_costs
from shoal.parallel.placement import Placement
from shoal.parallel.redistribute import Redistribution
from shoal.parallel.route import AxisCosts, Question, Step, route, seconds, steps_from
from tests.parallel.grid import Grid, check_placed, given_out, on_grid
from tests.pool import disposable_ranks, run_ranks

COSTS = AxisCosts({"a": 3e-5, "b": 1e-5, "c": 2e-5}, {"a": 1e9, "b": 4e9, "c": 2e9})
WHOLE = AxisCosts({"a": 0.0, "b": 0.0, "c": 0.0}, {"a": 1.0, "b": 1.0, "c": 1.0})
"""Time is the bytes that a rank sends."""


@cache
def placements(ndim: int, axes: tuple[str, ...]) -> list[Placement]:
    """All of them: each axis cuts a dim, sums, or does neither, in every order."""
    found = set()
    for places in product(range(-2, ndim), repeat=len(axes)):
        for order in permutations(range(len(axes))):
            dims: list[tuple[str, ...]] = [()] * ndim
            for number in order:
                if places[number] >= 0:
                    dims[places[number]] += (axes[number],)
            found.add(
                Placement(tuple(dims), frozenset(axis for axis, place in zip(axes, places, strict=True) if place == -2))
            )
    return sorted(found, key=str)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1, 1 + prod(shape), dtype=torch.float64).view(shape)


def check(sizes: dict[str, int], shape: tuple[int, ...], pairs: list[tuple[Placement, Placement]]) -> None:
    """Values, and the gradient of a sum of the result weighted by `shape` other numbers."""
    values, weights = numbered(shape), numbered(shape).flip(0) * 3

    def run(grid: Grid) -> list[tuple[torch.Tensor, ...]]:
        found = []
        for source, target in pairs:
            x = given_out(values, source, grid).requires_grad_()
            y = Redistribution(shape, source, target, grid, COSTS)(x)
            (gradient,) = torch.autograd.grad(y, x, given_out(weights, target.dual(), grid))
            found.append(
                (
                    y.detach(),
                    given_out(values, Placement(target.dims), grid),
                    gradient,
                    given_out(weights, source.dual(), grid),
                )
            )
        return found

    ranks = on_grid(sizes, run)
    for number, (source, target) in enumerate(pairs):
        held, wanted, gradients, of_whole = zip(*(rank[number] for rank in ranks), strict=True)
        check_placed(target, sizes, held, wanted)
        check_placed(source.dual(), sizes, gradients, of_whole)


@pytest.mark.fast
@pytest.mark.parametrize("shape", [(6, 4), (5, 3), (1, 7)], ids=str)
@pytest.mark.parametrize("sizes", [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 3}], ids=str)
def test_every_pair_of_placements(sizes, shape):
    check(sizes, shape, list(product(placements(2, tuple(sizes)), repeat=2)))


THREE = {"a": 2, "b": 2, "c": 2}
PAIRS = list(product(placements(2, tuple(THREE)), repeat=2))


def test_pairs_on_a_mesh_of_three_axes():
    check(THREE, (8, 5), PAIRS[::29])


@pytest.mark.matrix
@pytest.mark.parametrize("shape", [(8, 16), (7, 5)], ids=str)
@pytest.mark.parametrize("part", range(8))
def test_every_pair_on_a_mesh_of_three_axes(shape, part):
    check(THREE, shape, PAIRS[part::8])


def test_tensors_of_one_and_of_three_dims():
    check({"a": 2, "b": 2}, (9,), list(product(placements(1, ("a", "b")), repeat=2)))
    check({"a": 2, "b": 2}, (4, 3, 6), list(product(placements(3, ("a", "b")), repeat=2))[::7])


@pytest.mark.fast
def test_where_each_uses_the_result_for_something_else_gradients_are_added():
    """Megatron-LM's f: nothing moves forward, the gradient is a sum."""
    whole = numbered((4, 3))

    def run(grid: Grid) -> torch.Tensor:
        same = Placement.of(2)
        x = whole.clone().requires_grad_()
        y = Redistribution((4, 3), same, same, grid, COSTS, summed=frozenset({"a"}))(x)
        (y * (1.0 + grid.rank("a"))).sum().backward()
        assert torch.equal(y, whole) and x.grad is not None
        return x.grad

    for gradient in on_grid({"a": 3}, run):
        assert torch.equal(gradient, torch.full((4, 3), 6.0, dtype=torch.float64))


def tangents_and_second_derivatives(world: World) -> None:
    groups = MeshGroups(Mesh(Plan(dp=2), world.rank, 2), world)
    costs = measured_costs(groups, torch.device("cpu"))
    source, target = Placement.of(2, {0: "dp"}), Placement.of(2, {1: "dp"})
    values, directions = numbered((4, 6)), numbered((4, 6)).flip(1)
    rows, columns = (
        (slice(2 * world.rank, 2 * world.rank + 2),),
        (slice(None), slice(3 * world.rank, 3 * world.rank + 3)),
    )
    move = Redistribution((4, 6), source, target, groups, costs)
    x, v = values[rows].clone(), directions[rows].clone()
    result, tangent = torch.func.jvp(move, (x,), (v,))
    assert torch.equal(result, values[columns]) and torch.equal(tangent, directions[columns])
    x.requires_grad_()
    (gradient,) = torch.autograd.grad((move(x) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((gradient * v).sum(), x)
    torch.testing.assert_close(second, 6 * x.detach() * v)
    every = world.everyone.all_gather_object((dict(costs.latency), dict(costs.rate)))
    assert every[0] == every[1] and costs.latency["dp"] > 0 and costs.latency["tp"] == 0


def test_tangents_and_second_derivatives_pass_between_ranks():
    run_ranks(tangents_and_second_derivatives, 2)


@pytest.mark.fast
def test_a_result_is_memory_of_its_own():
    def run(grid: Grid) -> None:
        x, same = torch.ones(4, 2), Placement.of(2)
        for target in (same, Placement.of(2, {0: "a"}), Placement.of(2, {}, "a")):
            y = Redistribution((4, 2), same, target, grid, COSTS)(x)
            y.fill_(7.0)
            assert float(x.sum()) == 8.0

    on_grid({"a": 2}, run)


# what a way costs


def question(shape: tuple[int, ...], sizes: dict[str, int]) -> Question:
    return Question(shape, 4, tuple(sizes.items()))


def names(steps: tuple[Step, ...]) -> list[str]:
    return [f"{step.operation} {' '.join(step.axes)}" for step in steps]


@pytest.mark.fast
def test_ways_that_are_known():
    asked = question((4096, 4096), {"a": 2, "b": 4})
    whole = Placement.of(2)
    assert names(route(asked, Placement.of(2, {0: "a"}), Placement.of(2, {1: "a"}), COSTS)) == ["all_to_all a"]
    assert names(route(asked, Placement.of(2, {0: "a b"}), Placement.of(2, {0: "b a"}), COSTS)) == ["permute a b"]
    aside = ["all_to_all b", "slice a", "all_to_all b"]
    assert names(route(asked, Placement.of(2, {0: "b"}), Placement.of(2, {0: "a b"}), COSTS)) == aside
    line = question((4096 * 4096,), {"a": 2, "b": 4})
    assert names(route(line, Placement.of(1, {0: "b"}), Placement.of(1, {0: "a b"}), COSTS)) == [
        "slice a",
        "permute b a",
    ]
    short = question((64, 64), {"a": 2, "b": 4})
    assert names(route(short, Placement.of(2, {}, "a"), Placement.of(2, {1: "a"}), COSTS)) == ["reduce_scatter a"]
    assert names(route(short, Placement.of(2, {}, "a b"), whole, COSTS)) == ["all_reduce a b"]
    assert route(asked, whole, whole, COSTS) == ()


@pytest.mark.fast
def test_costs_decide():
    """A sum over a fast axis inside a host and a slow one across: where messages are long it pays to sum cut pieces
    across."""
    inside_first = ["reduce_scatter b", "all_reduce a", "all_gather b"]
    slow_outside = AxisCosts({"a": 1e-5, "b": 1e-5}, {"a": 1e8, "b": 1e10})
    short, long = (question((rows, 64), {"a": 2, "b": 4}) for rows in (4, 65536))
    both, whole = Placement.of(2, {}, "a b"), Placement.of(2)
    assert names(route(long, both, whole, slow_outside)) == inside_first
    assert names(route(short, both, whole, slow_outside)) == ["all_reduce a b"]


def least(asked: Question, source: Placement, wanted: frozenset[str], costs: AxisCosts) -> dict[Placement, float]:
    """The least time to every placement, by relaxing all edges until nothing changes."""
    best, changed = {source: 0.0}, True
    while changed:
        changed = False
        for at, so_far in list(best.items()):
            for step in steps_from(asked, at, wanted):
                there = so_far + seconds(asked, at, step, costs)
                if there < best.get(step.placement, float("inf")) * (1 - 1e-12):
                    best[step.placement], changed = there, True
    return best


@pytest.mark.fast
@pytest.mark.parametrize("shape", [(12, 8), (5, 7)], ids=str)
def test_no_way_is_cheaper(shape):
    asked = question(shape, {"a": 2, "b": 3})
    for source in placements(2, ("a", "b")):
        best = {
            wanted: least(asked, source, wanted, COSTS)
            for wanted in {each.partial for each in placements(2, ("a", "b"))}
        }
        for target in placements(2, ("a", "b")):
            assert cost_of(asked, source, route(asked, source, target, COSTS), COSTS) == pytest.approx(
                best[target.partial][target], rel=1e-9
            )


def cost_of(asked: Question, source: Placement, steps: tuple[Step, ...], costs: AxisCosts) -> float:
    places = [source, *(step.placement for step in steps)]
    return sum(seconds(asked, before, step, costs) for (before, _), step in zip(pairwise(places), steps, strict=True))


def ways_of_dtensor(world, shape: tuple[int, ...]) -> list[tuple[Placement, Placement, tuple[Step, ...]]]:
    """Of each pair that DTensor knows the steps that it takes, in our terms."""
    from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    axes = ("a", "b", "c")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=axes)
    meta = TensorMeta(torch.Size(shape), torch.empty(shape).stride(), torch.float32)
    theirs = list(product([Replicate(), Partial(), Shard(0), Shard(1)], repeat=3))
    found = []
    for source, target in list(product(theirs, repeat=2))[::5]:
        if any(end.is_partial() and not begin.is_partial() for begin, end in zip(source, target, strict=True)):
            continue  # what DTensor refuses, or does without a collective
        infos = _gen_transform_infos_non_cached(DTensorSpec(mesh, source, meta), DTensorSpec(mesh, target, meta))
        at, steps = ours(source), []
        for info in infos:
            axis, (begin, end) = axes[info.mesh_dim], info.src_dst_placements
            at, step = transformed(at, axis, begin, end)
            steps.append(step)
        found.append((ours(source), ours(target), tuple(steps)))
    return found


def ours(placed) -> Placement:
    cuts = {
        dim: " ".join(axis for axis, each in zip("abc", placed, strict=True) if each == Shard(dim)) for dim in (0, 1)
    }
    return Placement.of(2, cuts, " ".join(axis for axis, each in zip("abc", placed, strict=True) if each.is_partial()))


def transformed(at: Placement, axis: str, begin, end) -> tuple[Placement, Step]:
    only = frozenset((axis,))
    if begin.is_shard():
        assert at.dims[begin.dim][-1] == axis
        joined = at.joined(begin.dim)
        if end.is_shard():
            there = joined.cut(end.dim, axis)
            return there, Step("all_to_all", (axis,), there, begin.dim, end.dim)
        return joined, Step("all_gather", (axis,), joined, begin.dim)
    if begin.is_partial():
        summed = at.summed(only)
        there = summed.cut(end.dim, axis) if end.is_shard() else summed
        return there, Step(
            "reduce_scatter" if end.is_shard() else "all_reduce", (axis,), there, end.dim if end.is_shard() else -1
        )
    there = at.cut(end.dim, axis)
    return there, Step("slice", (axis,), there, end.dim)


def test_never_dearer_than_dtensor():
    shape, cheaper = (64, 32), 0
    with disposable_ranks(ways_of_dtensor, 1, shape) as (rank,):
        ways = rank.result()
    assert len(ways) > 200
    asked = question(shape, THREE)
    for costs in (COSTS, WHOLE):
        for source, target, theirs in ways:
            mine, other = (
                cost_of(asked, source, steps, costs) for steps in (route(asked, source, target, costs), theirs)
            )
            assert mine <= other * (1 + 1e-9), f"{source} to {target}"
            cheaper += mine < other * 0.99
    assert cheaper > 20, "or this compares nothing"
