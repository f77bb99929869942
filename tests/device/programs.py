"""Small programs for an accelerator, each right or with one defect: what the simulator has to tell apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.device.simulator import Rank

SIZE = 1000


def device() -> torch.device:
    """The simulated device that is current."""
    return torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())


def prefetch(wait: bool) -> float:
    """Copies batches up on a stream beside the one that computes with them; 12000. The defect: it does not wait."""
    side, main, total = torch.Stream(device()), torch.accelerator.current_stream(), 0.0
    batches = [torch.full((SIZE,), float(number)).pin_memory() for number in range(4)]
    for batch in batches:
        with side:
            there = torch.empty(SIZE, device=device())
            there.copy_(batch, non_blocking=True)
        if wait:
            main.wait_stream(side)
        doubled = (there * 2).sum()
        there.record_stream(main)
        total += doubled.item()
    return total


def copy_aside(record: bool) -> float:
    """Copies a tensor down on another stream and forgets it meanwhile; 7000. The defect: no `record_stream`."""
    side, main = torch.Stream(device()), torch.accelerator.current_stream()
    out = torch.zeros(SIZE, pin_memory=True)
    x = torch.full((SIZE,), 7.0, device=device())
    side.wait_stream(main)
    with side:
        out.copy_(x, non_blocking=True)
    if record:
        x.record_stream(side)
    del x
    torch.full((SIZE,), -1.0, device=device())
    main.synchronize()
    side.synchronize()
    return out.sum().item()


def _by_operation(host: Tensor) -> float:
    return host.sum().item()


def _by_item(host: Tensor) -> float:
    return host[500].item() * SIZE


def _by_numpy(host: Tensor) -> float:
    return float(host.numpy().sum())


READERS: dict[str, Callable[[Tensor], float]] = {"operation": _by_operation, "item": _by_item, "numpy": _by_numpy}


def read_back(wait: bool, reader: str) -> float:
    """Copies down to pinned memory and reads it there; 3000. The defect: nothing waits for the copy."""
    x = torch.full((SIZE,), 3.0, device=device())
    host = torch.zeros(SIZE, pin_memory=True)
    host.copy_(x, non_blocking=True)
    if wait:
        event = torch.Event(device())
        event.record()
        event.synchronize()
    return READERS[reader](host)


def reuse_of_a_buffer(wait: bool) -> float:
    """Copies up from one pinned buffer twice; 3000. The defect: it is written anew while the first copy may run."""
    buffer, total = torch.zeros(SIZE, pin_memory=True), torch.zeros(SIZE, device=device())
    for value in (1.0, 2.0):
        buffer.fill_(value)
        total += buffer.to(device(), non_blocking=True)
        if wait:
            torch.accelerator.synchronize()
    return total.sum().item()


def without_pinning(pinned: bool) -> float:
    """Brings a tensor there and back, and means not to wait; 3000. The defect: the host's memory is not pinned."""
    here, back = (torch.full((SIZE,), 3.0, pin_memory=pinned) for _ in range(2))
    back.copy_(here.to(device(), non_blocking=True), non_blocking=True)
    torch.accelerator.synchronize()
    return back.sum().item()


def cast_on_the_way(up: bool, first: bool) -> float:
    """Brings bf16 up to fp32, or fp32 down to bf16, from or into pinned memory, and waits; 3000. The defect: torch
    casts on the host, in memory that is not pinned, unless the program casts `first`, on the device."""
    if up:
        x, there = torch.full((SIZE,), 3.0, dtype=torch.bfloat16).pin_memory(), torch.zeros(SIZE, device=device())
        there.copy_(x.to(device()) if first else x)
        return there.sum().item()
    x = torch.full((SIZE,), 3.0, device=device())
    here = torch.zeros(SIZE, dtype=torch.bfloat16, pin_memory=True)
    here.copy_(x.bfloat16() if first else x)
    return here.float().sum().item()


def beyond_capacity(size: int) -> str:
    """Allocates `size` bytes, frees them, and does it again; says how it ended."""
    try:
        for _ in range(2):
            torch.empty(size, dtype=torch.uint8, device=device())
        return "fits"
    except torch.OutOfMemoryError:
        return "out of memory"


def strided_halves() -> float:
    """Two streams at work on the left and the right half of one matrix, which share no byte; 3000."""
    side, main = torch.Stream(device()), torch.accelerator.current_stream()
    matrix = torch.zeros(10, 200, device=device())
    side.wait_stream(main)
    matrix[:, :100].fill_(1.0)
    with side:
        matrix[:, 100:].fill_(2.0)
    main.wait_stream(side)
    return matrix.sum().item()


def two_devices() -> tuple[float, int]:
    """Computes on one device with what another one made; 2000."""
    ones = torch.ones(SIZE, device=torch.device(device().type, 0))
    there = ones.to(torch.device(device().type, 1), non_blocking=True)
    return (there * 2).sum().item(), there.get_device()


def train(where: str | None, steps: int = 4) -> tuple[list[float], list[Tensor]]:
    """A plain loop of torch with AdamW and clipping: its losses and weights."""
    torch.manual_seed(0)
    target = device() if where is None else torch.device(where)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to(target)
    x, y = torch.randn(64, 8).to(target), torch.randint(0, 4, (64,)).to(target)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses], [p.detach().cpu() for p in model.parameters()]


def draws() -> dict[str, Any]:
    """What is random on the device is the seed's, and is drawn when it is asked for, not when it runs."""
    kind = device().type
    torch.manual_seed(3)
    first = torch.randn(5, device=device())
    dropped = nn.functional.dropout(torch.ones(1000, device=device()), 0.5)
    torch.manual_seed(3)
    again = torch.randn(5, device=device())
    own = torch.Generator(device()).manual_seed(5)
    drawn = [torch.rand(3, device=device(), generator=own.manual_seed(5)).cpu() for _ in range(2)]
    return {
        "again": torch.equal(first, again),
        "kept": (dropped > 0).float().mean().item(),
        "own": torch.equal(*drawn),
        "kind": own.device.type == kind,
    }


def shapes_from_data() -> tuple[list[int], bool, float]:
    """Operations whose result depends on the data, for which the host waits."""
    x = torch.tensor([0.0, 1.0, 2.0, 0.0]).to(device())
    return torch.nonzero(x).flatten().tolist(), torch.equal(x, x.clone()), x[x > 0].sum().item()


def attention() -> float:
    """Attention forward and backward beside the CPU's: the largest difference."""
    q = torch.randn(2, 4, 16, 8)

    def gradient(where: torch.device | str) -> Tensor:
        x = q.to(where).requires_grad_()
        nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).square().sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    return (gradient(device()) - gradient("cpu")).abs().max().item()


def a_polling_host() -> int:
    """Asks an event again and again until it is done."""
    x = torch.ones(SIZE, device=device()) + 1
    event = torch.Event(device())
    event.record()
    asked = 1
    while not event.query():
        asked += 1
    return asked if x.sum().item() == 2 * SIZE else -1


def in_group(rank: Rank) -> None:
    """Joins the default process group, on the rank's own device."""
    torch.accelerator.set_device_index(rank.rank)
    store = dist.FileStore(f"{rank.folder}/store", rank.size)
    backend = dist.get_default_backend_for_device(device())
    dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.size)


def reduced_beside(rank: Rank, wait: bool) -> float:
    """Sums a tensor over the ranks, and uses it; 3000 on two. The defect: it does not wait for the sum."""
    in_group(rank)
    x = torch.full((SIZE,), float(rank.rank + 1), device=device())
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    if wait:
        work.wait()
    total = (x * 1).sum().item()
    work.wait()
    return total


def sent_and_given_up(rank: Rank, record: bool) -> float:
    """A sum on another stream, which alone waits for it. The defect: the tensor was made on this one, and is given up
    before the sum is there."""
    in_group(rank)
    side, one = torch.Stream(device()), torch.ones(SIZE, device=device())
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        if record:
            one.record_stream(side)
        dist.all_reduce(one)
    del one
    return torch.ones(SIZE, device=device()).sum().item()


def collectives(rank: Rank) -> dict[str, Any]:
    """Every collective of torch.distributed once, blocking: what each leaves on this rank."""
    in_group(rank)
    mine, size = rank.rank, rank.size

    def x(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device())

    def blank(n: int) -> list[Tensor]:
        return [torch.empty(n, device=device()) for _ in range(size)]

    found: dict[str, Any] = {}
    each = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "avg": dist.ReduceOp.AVG}
    for name, op in each.items():
        found[name] = x(mine, 1)
        dist.all_reduce(found[name], op)
    found["broadcast"] = x(mine)
    dist.broadcast(found["broadcast"], 1)
    found["reduce"] = x(mine + 1)
    dist.reduce(found["reduce"], 1)
    found["all_gather"] = blank(1)
    dist.all_gather(found["all_gather"], x(mine))
    found["all_gather_into_tensor"] = torch.cat(blank(2))
    dist.all_gather_into_tensor(found["all_gather_into_tensor"], x(mine, -mine))
    found["reduce_scatter"] = x(0)
    dist.reduce_scatter(found["reduce_scatter"], [x(mine + place) for place in range(size)])
    found["reduce_scatter_tensor"] = x(0)
    dist.reduce_scatter_tensor(found["reduce_scatter_tensor"], torch.cat([x(mine + place) for place in range(size)]))
    found["gather"] = blank(1) if mine == 0 else []
    dist.gather(x(mine), found["gather"] or None, 0)
    found["scatter"] = x(0)
    dist.scatter(found["scatter"], [x(place * 10) for place in range(size)] if mine == 0 else None, 0)
    found["all_to_all"] = blank(1)
    dist.all_to_all(found["all_to_all"], [x(10 * mine + place) for place in range(size)])
    found["uneven"] = torch.empty(size * (mine + 1), device=device())
    splits = [place + 1 for place in range(size)]
    dist.all_to_all_single(found["uneven"], x(*range(sum(splits))), [mine + 1] * size, splits)
    around = x(-1)
    operations = [dist.P2POp(dist.isend, x(mine), (mine + 1) % size), dist.P2POp(dist.irecv, around, (mine - 1) % size)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    found["around"] = around
    with dist._coalescing_manager(device=device()) as _:
        found["together"] = [x(mine), x(2 * mine)]
        for tensor in found["together"]:
            dist.all_reduce(tensor)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": mine})
    dist.barrier()
    return {name: _values(value) for name, value in found.items()} | {"objects": objects}


def _values(found: Any) -> list[float]:
    return [value for part in found for value in part.tolist()] if isinstance(found, list) else found.tolist()


def sends(rank: Rank, first: bool) -> float:
    """Two ranks exchange a tensor; 3 from the other. The defect: both send first, which NCCL need not buffer."""
    in_group(rank)
    mine, other = torch.full((SIZE,), 3.0, device=device()), torch.empty(SIZE, device=device())
    if rank.rank == 0 or first:
        dist.send(mine, 1 - rank.rank)
        dist.recv(other, 1 - rank.rank)
    else:
        dist.recv(other, 1 - rank.rank)
        dist.send(mine, 1 - rank.rank)
    return other.mean().item()


def calls_that_differ(rank: Rank, how: str) -> float:
    """The ranks do not make the same calls: NCCL would hang, or mix up their data."""
    in_group(rank)
    x = torch.ones(SIZE + (rank.rank if how == "size" else 0), device=device())
    if how == "order" and rank.rank == 1:
        dist.broadcast(x, 0)
    if how != "absence" or rank.rank == 0:
        dist.all_reduce(x)
    return x.sum().item()


def ddp(rank: Rank) -> list[Tensor]:
    """A step of torch's DistributedDataParallel: the gradients."""
    in_group(rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device())
    model = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(rank.rank)
    model(torch.randn(6, 8).to(device())).square().mean().backward()
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]
