"""Where the optimizer's side of each chunk lies between updates: on the device where it fits beside all weights, on the host, on the disk."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.chunks.chunk import Chunk
from shoal.chunks.tier import Tier
from shoal.errors import BudgetExceeded
from shoal.optim.tiers.disk import sectors
from shoal.optim.tiers.page import has_master, mirrored, parts
from shoal.optim.tiers.pager import BUFFERS

IN_TURN = "optimizer state in turn"
"""The role of pages that come, are updated and go."""


def on_disk(chunks: Sequence[Chunk], keys: Sequence[str], host: Tier, disk: bool) -> list[Chunk]:
    """Books in `host` what the owned `chunks` keep there, by role, and returns those whose masters and state must lie on the disk: all of them if there is
    a `disk` and no limit of the host's, else as few as it takes, those of the deepest layers, whose gradients come first.

    `keys`: of the state, those with one value an element. Raises BudgetExceeded with the smallest budget that would do.
    """
    trained = [chunk for chunk in chunks if chunk.trainable and chunk.slots]
    pages = {chunk.index: _paged(chunk, keys) for chunk in trained}
    host.measures = True
    for chunk in chunks:
        host.take("weights", chunk.data.nbytes)
        for role, size in side(chunk, keys).items():
            host.take(role, size)
    sizes = [sum(pages[chunk.index].values()) for chunk in trained]
    largest = max((parts(chunk, keys)[1] + sum(sectors(each.nbytes) for each in mirrored(chunk)) for chunk in trained), default=0)
    away = trained[: number_away(sizes, largest, host.used - sum(sizes), host.capacity) if disk else 0]
    if away:
        host.take(IN_TURN, min(BUFFERS, len(trained)) * largest)
    for chunk in away:
        for role, size in pages[chunk.index].items():
            host.give(role, size)
    host.measures, host.most_in_all = False, host.used
    if host.capacity is not None and host.used > host.capacity:
        remedy = "" if disk else ' (plan.memory.disk = {path = "..."} would take optimizer state and masters)'
        raise BudgetExceeded(host.used, host.capacity, f"{host.name} for {', '.join(role for role in host.held)}{remedy}")
    return away


def number_away(pages: Sequence[int], largest: int, kept: int, capacity: int | None) -> int:
    """How many of `pages` (bytes), from the first on, lie on the disk, where the host has `capacity` bytes and `kept` of them are taken: all without a
    limit. The `largest` buffer is what those that come and go need there, BUFFERS of them."""
    if capacity is None:
        return len(pages)
    if kept + sum(pages) <= capacity:
        return 0
    number, room = len(pages), capacity - kept - min(BUFFERS, len(pages)) * largest
    while number and (room := room - pages[number - 1]) >= 0:
        number -= 1
    return number


def on_device(chunks: Sequence[Chunk], keys: Sequence[str], spare: int) -> list[Chunk]:
    """Of `chunks` that pass, those whose optimizer's side fits in `spare` bytes of the device, beside the weights of all: the shallowest layers, whose updates
    the next forward would wait for first."""
    fit = []
    for chunk in reversed(chunks):
        spare -= sum(side(chunk.owned, keys).values())
        if spare < 0:
            break
        fit.append(chunk)
    return fit


def move_to_device(chunk: Chunk, keys: Sequence[str], host: Tier, device: Tier) -> None:
    """Books what `chunk` has on the host as something on the device."""
    host.give("weights", chunk.owned.data.nbytes)
    device.take("weights", chunk.nbytes_whole)
    for role, size in side(chunk.owned, keys).items():
        host.give(role, size)
        device.take(role, size)


def side(owned: Chunk, keys: Sequence[str]) -> dict[str, int]:
    """Bytes of the optimizer's side of an owned chunk by role."""
    if not owned.trainable:
        return {}
    kept, rest = _paged(owned, keys), owned.rest_of_masters
    kept["masters"] += rest.nbytes if rest is not None else 0
    return {"gradients": owned.grad.nbytes if owned.grad is not None else 0, **kept}


def _paged(owned: Chunk, keys: Sequence[str]) -> dict[str, int]:
    """What of it a page holds."""
    each = owned.size * owned.master_like.dtype.itemsize
    return {"masters": each * has_master(owned), "optimizer state": each * len(keys)}
