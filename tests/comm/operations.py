"""Every operation of a Group on drawn tensors, and what it must give: shared by the tests of the transports."""

from __future__ import annotations

import torch

from shoal.comm import Group
from shoal.comm.reductions import COMBINE

OPS = ("sum", "avg", "min", "max", "product")


def draw(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0 if dtype == torch.uint8 else -9, 10, (numel,), generator=generator).to(dtype)


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    return OPS if dtype.is_floating_point else tuple(op for op in OPS if op != "avg")


def splits_of(rank: int, size: int) -> list[int]:
    """What `rank` sends to each in the uneven all-to-all; nothing from 0 to 1."""
    return [(rank + 2 * other) % 4 if (rank, other) != (0, 1) else 0 for other in range(size)]


def every_operation(group: Group, dtype: torch.dtype, numel: int) -> dict[str, torch.Tensor]:
    """What this rank gets from each operation. `numel` elements a rank's cut."""
    rank, size = group.rank, group.size
    mine, whole = draw(rank, numel, dtype), draw(rank, size * numel, dtype)
    sends, receives = splits_of(rank, size), [splits_of(other, size)[rank] for other in range(size)]
    right, left = (rank + 1) % size, (rank - 1) % size
    got = {}
    for op in ops_of(dtype):
        got[f"all_reduce {op}"] = group.all_reduce(mine.clone(), op)
        got[f"reduce_scatter {op}"] = group.reduce_scatter(torch.empty_like(mine), whole.clone(), op=op)
    got["all_gather"] = group.all_gather(torch.empty_like(whole), mine)
    in_place = torch.zeros_like(whole)
    own = in_place.view(size, -1)[rank].copy_(mine)
    got["all_gather in place"] = group.all_gather(in_place, own)
    got["all_to_all"] = group.all_to_all(torch.empty_like(whole), whole)
    uneven = draw(rank, sum(sends), dtype)
    got["all_to_all uneven"] = group.all_to_all(torch.empty(sum(receives), dtype=dtype), uneven, receives, sends)
    for root in range(size):
        got[f"broadcast {root}"] = group.broadcast(mine.clone(), root)
        got[f"scatter {root}"] = group.scatter(torch.empty_like(mine), whole if rank == root else None, root)
        gathered = group.gather(torch.empty_like(whole) if rank == root else None, mine, root)
        assert (gathered is not None) == (rank == root)
        if gathered is not None:
            got[f"gather {root}"] = gathered
    got["exchange"] = group.exchange(torch.empty_like(mine), left, mine, right)
    if size > 1:
        if rank == 0:
            group.send(mine, size - 1)
        if rank == size - 1:
            got["recv"] = group.recv(torch.empty_like(mine), 0)
    group.barrier()
    return got


def expected(rank: int, size: int, dtype: torch.dtype, numel: int) -> dict[str, torch.Tensor]:
    """The same, worked out from all ranks' tensors; reductions in rank order."""
    mine = [draw(other, numel, dtype) for other in range(size)]
    whole = [draw(other, size * numel, dtype) for other in range(size)]
    gives = [draw(other, sum(splits_of(other, size)), dtype).split(splits_of(other, size)) for other in range(size)]
    want = {}
    for op in ops_of(dtype):
        want[f"all_reduce {op}"] = in_order(mine, op)
        want[f"reduce_scatter {op}"] = in_order([tensor.view(size, -1)[rank] for tensor in whole], op)
    want["all_gather"] = want["all_gather in place"] = torch.cat(mine)
    want["all_to_all"] = torch.cat([tensor.view(size, -1)[rank] for tensor in whole])
    want["all_to_all uneven"] = torch.cat([give[rank] for give in gives])
    for root in range(size):
        want[f"broadcast {root}"] = mine[root]
        want[f"scatter {root}"] = whole[root].view(size, -1)[rank]
    want[f"gather {rank}"] = torch.cat(mine)
    want["exchange"] = mine[(rank - 1) % size]
    if size > 1 and rank == size - 1:
        want["recv"] = mine[0]
    return want


def in_order(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    """((t0 + t1) + t2) + ..., in the tensors' dtype."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = COMBINE[op](total, tensor)
    return total / len(tensors) if op == "avg" else total


def differing(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    """The operations whose bits differ, or that only one side has."""
    common = got.keys() & want.keys()
    return sorted((got.keys() ^ want.keys()) | {name for name in common if not torch.equal(got[name], want[name])})
