"""Placement of each chunk's gradients, masters and optimizer state between updates: device, host or disk."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.chunks import Buffer, Chunk
from shoal.chunks.tier import Tier
from shoal.device import CPU
from shoal.errors import BudgetExceeded
from shoal.optim.tiers.disk import sectors
from shoal.optim.tiers.page import has_master, mirrored, parts
from shoal.optim.tiers.pager import BUFFERS

IN_TURN = "optimizer state in turn"
"""Role of pages that come, are updated and go."""


def on_disk(
    chunks: Sequence[Buffer], keys: Sequence[str], host: Tier, disk: bool, others: bool = False
) -> list[Buffer]:
    """Chooses the owned `chunks` whose masters and state lie on the disk, and books in `host` what the others keep
    there.

    All lie on the disk if there is a `disk` and the host has no limit, or `others` want what is left of it; else as few
    as it takes, those of the deepest layers, whose gradients come first. `keys`: of the state, those with one value an
    element; `others`: see `number_away`. Raises BudgetExceeded with the smallest budget that would do.
    """
    trained = [chunk for chunk in chunks if chunk.trainable and chunk.slots]
    pages = {chunk.index: _paged(chunk, keys) for chunk in trained}
    host.measures = True
    for chunk in chunks:
        host.take("weights", chunk.data.nbytes)
        for role, size in side(chunk, keys).items():
            host.take(role, size)
    sizes = [sum(pages[chunk.index].values()) for chunk in trained]
    whole = (parts(chunk, keys)[1] + sum(sectors(each.nbytes) for each in mirrored(chunk)) for chunk in trained)
    largest = max(whole, default=0)
    away = trained[: number_away(sizes, largest, host.used - sum(sizes), host.capacity, others) if disk else 0]
    if away:
        host.take(IN_TURN, min(BUFFERS, len(trained)) * largest)
    for chunk in away:
        for role, size in pages[chunk.index].items():
            host.give(role, size)
    host.measures, host.most_in_all = False, host.used
    if host.capacity is not None and host.used > host.capacity:
        remedy = "" if disk else ' (plan.memory.disk = {path = "..."} would take optimizer state and masters)'
        raise BudgetExceeded(
            host.used, host.capacity, f"{host.name} for {', '.join(role for role in host.held)}{remedy}"
        )
    return away


def number_away(pages: Sequence[int], largest: int, kept: int, capacity: int | None, others: bool = False) -> int:
    """Counts how many of `pages` (bytes), from the first on, lie on the disk; all of them if the host has no limit, or
    `others` want what is left of it: activations, of which nobody knows yet how many there are.

    The host has `capacity` bytes, `kept` of them are taken, and pages on the disk need BUFFERS buffers of `largest`
    bytes.
    """
    if capacity is None or others:
        return len(pages)
    if kept + sum(pages) <= capacity:
        return 0
    number, room = len(pages), capacity - kept - min(BUFFERS, len(pages)) * largest
    while number and (room := room - pages[number - 1]) >= 0:
        number -= 1
    return number


def on_device(chunks: Sequence[Chunk], keys: Sequence[str], spare: int, device: torch.device) -> list[Chunk]:
    """Chooses, of `chunks` whose weights are gathered, those whose optimizer's side fits in `spare` bytes of the
    `device`.

    The shallowest layers come first, since the next forward would wait for their updates first.
    """
    fit = []
    for chunk in reversed(chunks):
        spare -= sum(side(chunk.owned, keys, device).values())
        if spare < 0:
            break
        fit.append(chunk)
    return fit


def move_to_device(chunk: Chunk, keys: Sequence[str], host: Tier, device: Tier) -> None:
    """Books what `chunk` has on the host in the tier of the device."""
    host.give("weights", chunk.owned.data.nbytes)
    device.take("weights", chunk.nbytes_whole)
    for role, size in side(chunk.owned, keys).items():
        host.give(role, size)
    for role, size in side(chunk.owned, keys, device.device).items():
        device.take(role, size)


def side(owned: Buffer, keys: Sequence[str], device: torch.device = CPU) -> dict[str, int]:
    """Counts the bytes of the optimizer's side of an owned chunk, by role, that it would take on `device`."""
    if not owned.trainable:
        return {}
    kept, rest = _paged(owned, keys), owned.rest_of_masters
    kept["masters"] += rest.nbytes if rest is not None else 0
    gradients = 0 if owned.grad is None else owned.grad.numel() * owned.gradient_dtype_on(device).itemsize
    return {"gradients": gradients, **kept}


def _paged(owned: Buffer, keys: Sequence[str]) -> dict[str, int]:
    """Counts the bytes of it that a page holds, by role."""
    each = owned.size * owned.master_like.dtype.itemsize
    return {"masters": each * has_master(owned), "optimizer state": each * len(keys)}
