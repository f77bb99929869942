"""The torch.distributed backend "shm": the same results as gloo, for torch's collectives, DDP, FSDP2 and DTensor."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from shoal.comm import World
from tests.pool import disposable_ranks, next_number, run_ranks


@contextmanager
def process_group(world: World, backend: str) -> Iterator[None]:
    store = dist.PrefixStore(f"backend{next_number(world)}", world.store)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=30))
    try:
        yield
    finally:
        dist.destroy_process_group()


def row(numel: int = 6) -> Tensor:
    """This rank's: whole numbers, so that the order of additions does not matter."""
    return torch.arange(numel, dtype=torch.float32) * (dist.get_rank() + 1) - 2


def reductions() -> list[Tensor]:
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        results.append(row())
        dist.all_reduce(results[-1], op)
    strided = row(12).view(3, 4).t()
    dist.all_reduce(strided)
    leaf = row().requires_grad_()
    dist.all_reduce(leaf)
    rooted = row()
    dist.reduce(rooted, dst=1)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as work:
        several = [row(3), row(5)]
        for tensor in several:
            dist.all_reduce(tensor)
    work.wait()
    return [*results, strided, leaf.detach(), *([rooted] if dist.get_rank() == 1 else []), *several]


def gathers() -> list[Tensor]:
    size = dist.get_world_size()
    parts = [torch.empty(3, 2) for _ in range(size)]
    dist.all_gather(parts, row().view(3, 2))
    whole = torch.empty(size * 6)
    dist.all_gather_into_tensor(whole, row())
    rooted = [torch.empty(6) for _ in range(size)] if dist.get_rank() == 0 else None
    dist.gather(row(), rooted, dst=0)
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    assert objects == [{"rank": rank} for rank in range(size)]
    return [*parts, whole, *(rooted or [])]


def scatters() -> list[Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    out, part = torch.empty(6), torch.empty(6)
    dist.reduce_scatter(out, [row() + other for other in range(size)])
    dist.reduce_scatter_tensor(part, row(6 * size))
    got = torch.empty(6)
    dist.scatter(got, [row() + other for other in range(size)] if rank == 1 else None, src=1)
    copied = row()
    dist.broadcast(copied, src=1)
    return [out, part, got, copied]


def all_to_alls() -> list[Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    even = torch.empty(2 * size, 3)
    dist.all_to_all_single(even, row(6 * size).view(2 * size, 3))
    sends, receives = [rank + other for other in range(size)], [other + rank for other in range(size)]
    uneven = torch.empty(sum(receives), 2)
    dist.all_to_all_single(uneven, row(2 * sum(sends)).view(-1, 2), receives, sends)
    return [even, uneven]


def messages() -> list[Tensor]:
    """More than lies in memory at once, sent by all before any receives."""
    size, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % size, (rank - 1) % size
    got, small = torch.empty(1_000_000), torch.empty(2)
    sends = [
        dist.P2POp(dist.isend, torch.full((1_000_000,), float(rank)), right),
        dist.P2POp(dist.isend, row(2), right),
    ]
    receives = [dist.P2POp(dist.irecv, got, left), dist.P2POp(dist.irecv, small, left)]
    for work in dist.batch_isend_irecv(sends + receives):
        work.wait()
    blocking = row()
    dist.send(blocking, 1) if rank == 0 else dist.recv(blocking, 0) if rank == 1 else None
    return [got, small, blocking]


def sparse() -> list[Tensor]:
    """Entries that some ranks have in common, in hybrid form, not coalesced; none at all on rank 0."""
    rank = dist.get_rank()
    places = torch.tensor([[rank, rank, 0], [1, 1, 2]])[:, : 3 * min(rank, 1)]
    tensor = torch.sparse_coo_tensor(places, row(3 * 2).view(3, 2)[: places.size(1)], (4, 3, 2), check_invariants=True)
    dist.all_reduce(tensor)
    return [tensor.coalesce().indices().double(), tensor.coalesce().values()]


def any_source() -> list[Tensor]:
    """Rank 0 hears of all others, each of whose letters has its number; what has another tag stays for whom it is
    meant."""
    if dist.get_rank() > 0:
        dist.send(torch.full((3,), 100.0 + dist.get_rank()), 0, tag=7)
        dist.send(torch.full((3,), 200.0 + dist.get_rank()), 0, tag=8)
        return []
    letters = {}
    for _ in range(dist.get_world_size() - 1):
        letter = torch.empty(3)
        source = dist.recv(letter, tag=7)
        assert float(letter[0]) == 100 + source
        letters[source] = letter
    for other in letters:
        dist.recv(letters[other], other, tag=8)
    return [letters[other] for other in sorted(letters)]


def asynchronous() -> list[Tensor]:
    """Works finish in order, also before a call that waits."""
    tensors = [row(1000) for _ in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    doubled = works[0].get_future().then(lambda future: future.value()[0] * 2)
    last = row(10)
    dist.all_reduce(last)
    for work in works:
        work.wait()
    assert all(work.is_completed() for work in works)
    return [*tensors, doubled.wait(), last]


def subgroups() -> list[Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    first, last = dist.new_group([0, 1]), dist.new_group([size - 2, size - 1])
    mine, other = row(), row()
    dist.all_reduce(mine, group=first)
    dist.broadcast(other, src=size - 1, group=last)
    dist.barrier()
    return [mine if rank < 2 else torch.empty(0), other if rank >= size - 2 else torch.empty(0)]


def outcome(world: World, backend: str, fn: Callable[..., list[Tensor]]) -> list[Tensor]:
    with process_group(world, backend):
        return [tensor.clone() for tensor in fn()]


def same_on_both(world: World, fn: Callable[..., list[Tensor]]) -> list[int]:
    """The places of the results that are not bit by bit those of gloo."""
    ours, theirs = outcome(world, "shm", fn), outcome(world, "gloo", fn)
    assert len(ours) == len(theirs)
    return [place for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(mine, other)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "fn",
    [reductions, gathers, scatters, messages, sparse, any_source, asynchronous, subgroups],
    ids=lambda fn: fn.__name__,
)
def test_the_results_are_those_of_gloo(fn, size):
    assert run_ranks(same_on_both, size, fn) == [[]] * size


@pytest.mark.parametrize("fn", [all_to_alls], ids=lambda fn: fn.__name__)
def test_the_all_to_alls_are_those_of_gloo(fn):
    assert run_ranks(same_on_both, 3, fn) == [[]] * 3


def beyond_gloo(world: World) -> list:
    size, rank = world.size, world.rank
    with process_group(world, "cpu:shm"):
        average = row()
        dist.all_reduce(average, dist.ReduceOp.AVG)
        outs = [torch.empty(2) for _ in range(size)]
        dist.all_to_all(outs, [torch.full((2,), 10.0 * rank + other) for other in range(size)])
        uneven = torch.empty(1 + rank)
        dist.reduce_scatter(uneven, [torch.full((1 + other,), float(rank + other)) for other in range(size)])
        return [average.tolist(), [out.tolist() for out in outs], uneven.tolist()]


def test_what_gloo_does_not_have():
    for rank, (average, swapped, uneven) in enumerate(run_ranks(beyond_gloo, 2)):
        assert average == [-2.0, -0.5, 1.0, 2.5, 4.0, 5.5]
        assert swapped == [[float(rank)] * 2, [10.0 + rank] * 2]
        assert uneven == [1.0 + 2 * rank] * (1 + rank)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def train(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_with_ddp() -> list[Tensor]:
    model = DistributedDataParallel(net(), bucket_cap_mb=0.0005)  # several buckets
    train(model)
    return [parameter.detach() for parameter in model.parameters()]


def train_with_fsdp2() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = net()
    for part in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(part, mesh=mesh)
    train(model)
    return [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]


def redistribute() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    rows = distribute_tensor(torch.arange(30.0).view(5, 6), mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = columns @ distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0)])
    return [
        rows.to_local(),
        columns.to_local(),
        rows.redistribute(mesh, [Replicate()]).to_local(),
        product.full_tensor(),
        rows.sum().full_tensor(),
    ]


@pytest.mark.parametrize("fn", [train_with_ddp, train_with_fsdp2, redistribute], ids=lambda fn: fn.__name__)
def test_ddp_fsdp2_and_dtensor_give_what_they_give_on_gloo(fn):
    assert run_ranks(same_on_both, 2, fn) == [[]] * 2


def train_on_a_mesh(world: World) -> bool:
    """FSDP2 over rows and replicas over columns of a 2 x 2 mesh: sub-groups of both kinds."""
    with process_group(world, "shm"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = net()
        fully_shard(model, mesh=mesh)
        train(model)
        hybrid = [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]
        plain = train_with_ddp()
        return all(torch.allclose(mine, other, rtol=1e-5, atol=1e-6) for mine, other in zip(hybrid, plain, strict=True))


def test_a_mesh_of_two_dimensions():
    assert run_ranks(train_on_a_mesh, 4) == [True] * 4


def refusals(world: World) -> None:
    with process_group(world, "shm"):
        with pytest.raises(NotImplementedError, match="not by"):
            dist.all_reduce(torch.ones(1, dtype=torch.int32), dist.ReduceOp.BAND)
        with pytest.raises(TypeError, match="dense CPU tensors"):
            dist.broadcast(torch.ones(2, 2).to_sparse(), 0)
        with pytest.raises(NotImplementedError, match="summed"):
            dist.all_reduce(torch.ones(2, 2).to_sparse(), dist.ReduceOp.MAX)
        with pytest.raises(RuntimeError, match="no collectives for tensors on cuda"):
            dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
        work = dist.all_reduce(torch.ones(2 + world.rank), async_op=True)
        with pytest.raises(RuntimeError, match="does not fit"):
            work.wait()


@pytest.mark.fast
def test_what_cannot_be_is_refused_and_a_failure_comes_with_the_work():
    run_ranks(refusals, 2)


def without_shared_memory(world: World) -> str:
    fallocate, os.posix_fallocate = os.posix_fallocate, _no_space
    try:
        with pytest.raises(ValueError) as failure, process_group(world, "shm"):
            pass
        return str(failure.value)
    finally:
        os.posix_fallocate = fallocate


def _no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.filterwarnings("ignore:shared memory cannot be used")
def test_without_shared_memory_the_user_is_sent_to_gloo():
    for message in run_ranks(without_shared_memory, 2):
        assert message.endswith('Use the backend "gloo"')


def nobody_sends(world: World, how: str) -> str:
    with process_group(world, "shm"):
        transport = dist.group.WORLD._transport  # type: ignore[union-attr]
        dist.barrier()
        if world.rank == 1:
            if how == "leaves":
                transport.close()
            elif how == "dies":
                os._exit(9)
            else:
                dist.recv(torch.empty(1), 0, tag=3)
            return ""
        if how == "late":
            transport._view.watch._timeout = 0.3
        try:
            dist.recv(torch.empty(3), tag=7)
        except RuntimeError as error:
            return str(error)
        finally:
            if how == "late":
                transport.close()
    return "no error"


@pytest.mark.parametrize(
    "how, said",
    [
        ("leaves", "rank 1 has closed the group"),
        ("dies", "process of the group's rank 1 has ended"),
        ("late", "rank 1 until the timeout"),
    ],
)
def test_who_waits_for_any_rank_learns_that_none_will_send(how, said):
    with disposable_ranks(nobody_sends, 2, how) as ranks:
        assert said in ranks[0].result(20)


def start_and_stop(world: World, times: int) -> list[tuple[int, int]]:
    marks = []
    for _ in range(times):
        with process_group(world, "shm"):
            dist.all_reduce(torch.ones(3), async_op=True).wait()
            pending = dist.irecv(torch.ones(3), 1 - world.rank)  # never sent
        with pytest.raises(RuntimeError, match=r"has been closed|closed the group"):
            pending.wait()  # type: ignore[union-attr]
        del pending
        gc.collect()  # the traceback's frames
        marks.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    return marks


def test_starting_and_stopping_leaves_nothing():
    for marks in run_ranks(start_and_stop, 2, 8):
        assert len(set(marks[1:])) == 1, f"descriptors and threads: {marks}"


def alone(world: World) -> list[Tensor]:
    return [tensor for fn in (gathers, all_to_alls, asynchronous) for tensor in outcome(world, "shm", fn)]


def test_a_group_of_one_rank():
    gathered = run_ranks(alone, 1)[0]
    assert gathered[0].flatten().tolist() == [-2.0, -1.0, 0.0, 1.0, 2.0, 3.0]
