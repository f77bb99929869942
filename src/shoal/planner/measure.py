"""This machine as a cluster: what its device, memory, disk and groups reach, measured in a few seconds and kept with
its age (see kept), and what runs have said of it (see learned)."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from shoal.comm import Reach, Reaches, World, measure_reaches
from shoal.comm.reaches import hosts_of
from shoal.device import (
    CPU,
    free_memory,
    hardware_name,
    is_accelerator,
    kind_of,
    measure_cold,
    measure_operations,
    measure_products,
    measure_shortest,
    quickest,
)
from shoal.device.memory import forget_most_allocated
from shoal.errors import StorageError
from shoal.optim.tiers.disk import THREADS, Stored, buffer
from shoal.planner.cluster import FORMATS, Cluster, Device, Host, Link
from shoal.planner.kept import ago, crowding, folder, in_turn, keep, key_of, read, threads_of
from shoal.planner.learned import learned, newest

log = logging.getLogger(__name__)

COPIED, WRITTEN = 64 * 2**20, 32 * 2**20
USUAL = Link(1.5e-4, 2e9)
"""Between ranks of a host over memory that they share, where nobody has measured it."""
ON_HOST, ON_DEVICE = (torch.float32, torch.bfloat16), (torch.float32, torch.bfloat16, torch.float16)
"""Formats whose products are measured beside the one that is asked for, on the host's cores and on an accelerator."""


@dataclass(frozen=True)
class Rates:
    """What a device reaches with so many threads.

    - `flops`: operations a second of its best products, by format
    - `reached`: shares of that which products of the format that was asked for reach, by the operations of one
    - `bandwidth`: bytes a second of other operations; `launch`: seconds of one beside its work, with autograd's part
      and that of the modules around it; `cold`: how many times longer that is where it comes once, after products
    - `to_host`: bytes a second that are copied between its memory and the host's; `disk`: written and read again
    - `took`, `at`: seconds that measuring took, and when it was, in Unix time
    """

    flops: dict[str, float]
    reached: tuple[tuple[float, float], ...]
    bandwidth: float
    launch: float
    cold: float
    to_host: float
    disk: float
    took: float
    at: float

    def peak(self, dtype: torch.dtype) -> float:
        """Operations a second of the best products in `dtype`, which was measured."""
        return self.flops[_format(dtype)]

    def __str__(self) -> str:
        peaks = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in self.flops.items())
        (small, least), (large, most) = self.reached[0], self.reached[-1]
        disk = f", disk {self.disk / 1e9:.2g} GB/s" if self.disk else ""
        return (
            f"products {peaks} GFLOP/s ({least:.0%} of it at {small:.0e} operations, {most:.0%} at {large:.0e}), "
            f"memory {self.bandwidth / 1e9:.3g} GB/s, copies to the host {self.to_host / 1e9:.3g} GB/s{disk}"
        )


def rates(device: torch.device, dtype: torch.dtype, fresh: bool = False) -> Rates:
    """Returns what `device` reaches with the current number of threads, as measured before, or now."""
    key = key_of("rates", device, dtype, torch.get_num_threads())
    with in_turn(lambda: None if fresh else _known_rates(key)) as known:
        if known is not None:
            return known
        found = _measured(device, dtype)
        keep(key, asdict(found))
    return found


def _known_rates(key: str) -> Rates | None:
    known = read(key)
    with suppress(TypeError, KeyError):
        return None if known is None else Rates(**{**known, "reached": tuple(map(tuple, known["reached"]))})
    return None


def _measured(device: torch.device, dtype: torch.dtype) -> Rates:
    log.info("measuring what this device reaches, once a month: it takes a few seconds")
    began = time.perf_counter()
    bandwidth, launch, alone = _bandwidth(device), measure_operations(device), measure_shortest(device)
    cold = 1.0 if is_accelerator(device) else measure_cold()
    rows = measure_products(device, dtype)
    flops = {_format(dtype): max(operations / seconds for operations, seconds in rows)}
    for other in ON_DEVICE if is_accelerator(device) else ON_HOST:
        with suppress(RuntimeError):  # a device need not have products of each
            if other != dtype:
                more = measure_products(device, other, largest=False)
                flops[_format(other)] = max(operations / seconds for operations, seconds in more)
    reached = _shares(rows, flops[_format(dtype)], dtype.itemsize, bandwidth, 0.0 if is_accelerator(device) else alone)
    copies, disk = _copies(device), _disk()
    forget_most_allocated(device)  # nothing of this is part of a run's peak
    return Rates(flops, reached, bandwidth, launch, cold, copies, disk, time.perf_counter() - began, time.time())


def _format(dtype: torch.dtype) -> str:
    return FORMATS.get(dtype, str(dtype).removeprefix("torch."))


def _shares(
    rows: Sequence[tuple[float, float]], peak: float, itemsize: int, bandwidth: float, launch: float
) -> tuple[tuple[float, float], ...]:
    """The share of `peak` that products reach, beside reading and writing their matrices and the launch: a smaller one
    reaches no more."""
    found: list[tuple[float, float]] = []
    for operations, seconds in reversed(rows):
        operands = 3 * (operations / 2) ** (2 / 3) * itemsize / bandwidth
        alone = max(seconds - operands - launch, 0.2 * seconds)
        share = min(1.0, operations / alone / peak)
        found.append((operations, min(share, found[-1][1] if found else 1.0)))
    return tuple(reversed(found))


def _bandwidth(device: torch.device) -> float:
    source = torch.ones(COPIED // 4, device=device)
    into = torch.empty_like(source)
    return 2 * COPIED / quickest(device, 4, lambda: torch.add(source, 1.0, out=into))


def _copies(device: torch.device) -> float:
    """Bytes a second to the host and back; without an accelerator from memory to memory."""
    there = torch.ones(COPIED // 4, device=device)
    host = torch.ones(COPIED // 4, pin_memory=is_accelerator(device))

    def work() -> None:
        host.copy_(there, non_blocking=True)
        there.copy_(host, non_blocking=True)

    return 2 * COPIED / quickest(device, 3, work)


def _disk() -> float:
    """Bytes a second that are written to the disk of the folder where this is kept and read from it, as pages are; 0
    where nothing can be written."""
    with suppress(OSError, StorageError):
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder()) as where, ThreadPoolExecutor(THREADS) as pool:
            file, pages = Stored(Path(where) / "pages", WRITTEN, pool), buffer(WRITTEN)
            try:
                file.allocate()

                def work() -> None:
                    for call in (file.write, file.read):
                        for part in call(pages):
                            part.result()

                work()  # the first write takes the room
                return 2 * WRITTEN / quickest(CPU, 2, work)
            finally:
                file.close()
    return 0.0


def groups_of(world: World, fresh: bool = False) -> Reaches | None:
    """What the groups of a world reach, as measured before for as many ranks on the same hosts, or now; None for a
    single rank. A collective call: rank 0 reads, and keeps."""
    if world.size == 1:
        return None
    hosts, own = hosts_of(world)
    key = _groups_key(world.device, world.size, own, hosts)
    carrier = world.everyone.transports[kind_of(world.device)].carrier
    known = partial(_carried, key, carrier, fresh)
    with in_turn(known) if world.rank == 0 else nullcontext() as found:
        found = world.everyone.broadcast_object(found)
        with suppress(KeyError, TypeError):
            if found is not None:
                return Reaches.from_wire(found)
        log.info("measuring what groups of these ranks reach, once a month: it takes a few seconds")
        measured = measure_reaches(world)
        if world.rank == 0:
            keep(key, measured.to_wire())
    return measured


def _carried(key: str, carrier: str, fresh: bool) -> dict[str, Any] | None:
    known = None if fresh else read(key)
    return known if known is not None and known.get("carrier") == carrier else None


def known_groups(device: torch.device, ranks: int, on_host: int, hosts: Sequence[str]) -> Reaches | None:
    """What groups of so many ranks of these hosts reach, if that was measured."""
    known = read(_groups_key(device, ranks, on_host, hosts))
    with suppress(KeyError, TypeError):
        return None if known is None else Reaches.from_wire(known)
    return None


def _groups_key(device: torch.device, ranks: int, on_host: int, hosts: Sequence[str]) -> str:
    threads = 0 if is_accelerator(device) else torch.get_num_threads()
    return key_of("groups", device, ranks, on_host, threads, *hosts)


def here(
    ranks: int, on_host: int, dtype: torch.dtype, device: torch.device = CPU, groups: Reaches | None = None,
    fresh: bool = False, hosts: Sequence[str] = (), sharing: int = 0,
) -> Cluster:  # fmt: skip
    """This machine as a cluster of `ranks` ranks, `on_host` of them on each host. `groups`: what these reach, where it
    was measured; else, for what was measured or learned before, `hosts` has their names, where this is not all.
    `sharing`: ranks among which the cores and the memory of this one are shared, where hosts have more than `on_host`,
    not all alike or not side by side."""
    on_host, own, before = min(on_host, ranks), is_accelerator(device), torch.get_num_threads()
    sharing = max(on_host, min(sharing, ranks))
    torch.set_num_threads(threads_of(device, sharing))
    try:
        found, crowd = rates(device, dtype, fresh), crowding(device, sharing)
        hosts = groups.hosts if groups is not None else hosts or (os.uname().nodename,) * (ranks == on_host)
        groups = groups or (known_groups(device, ranks, on_host, hosts) if ranks > 1 and hosts else None)
        known = learned(device, dtype, ranks, on_host, hosts) if hosts else None
    finally:
        torch.set_num_threads(before)
    memory = int(psutil.virtual_memory().available) * on_host // sharing
    forward, backward, update = (1.0, 1.0, 1.0) if known is None else (known.forward, known.backward, known.update)
    slower = crowd * forward
    what = Device(
        hardware_name(device) or "this host's cores",
        {name: rate / slower for name, rate in found.flops.items()},
        free_memory(device) or memory,
        found.bandwidth / slower,
        found.reached[-1][1],
        1.0,
        found.launch * slower,
        "measured",
        not own,
        found.reached,
        backward / forward,
        update / forward,
        crowd,
        forward,
        found.cold,
    )
    told = sorted((each for each in (groups, known) if each is not None), key=lambda each: each.at)
    inside = newest(reach for each in told for reach in each.inside)
    across = newest(reach for each in told for reach in each.across)
    update_rate = found.bandwidth * on_host / crowd
    scratch = str(folder() / "pages")  # beside what the disk was measured with
    host = Host(what, on_host, _link(inside), memory, found.to_host, found.disk, update_rate, scratch=scratch)
    return Cluster(
        "here",
        (host,) * max(1, ranks // on_host),
        _link(across) if across else host.inside,
        0.8 if own else 0.3,
        0.5 if groups is None else groups.contention,
        0.0 if known is None else known.other,
        0.0 if known is None else known.data,
        said=(_said(found, groups, ranks), *([] if known is None else [str(known)])),
        is_here=True,
    )


def _said(found: Rates, groups: Reaches | None, ranks: int) -> str:
    """What was measured, and when, in one line."""
    said = f"measured {ago(found.at)} in {found.took:.1f} s: {found}"
    if ranks == 1:
        return said
    if groups is None:
        return f"{said}; links assumed, none was measured (shoal plan --measure FILE measures them)"
    return f"{said}; {ago(groups.at)} in {groups.took:.1f} s: {groups}"


def _link(reached: Sequence[Reach]) -> Link:
    """The link whose ring would take what the largest all-reduce took, with what others reach."""
    whole = [each for each in reached if each.operation == "all_reduce"]
    if not whole:
        return Link(USUAL.latency, USUAL.bandwidth, tuple(reached))
    most = max(whole, key=lambda each: each.ranks)
    return ring_of(most.ranks, most.latency, most.bandwidth, tuple(reached))


def ring_of(ranks: int, latency: float, bandwidth: float, reached: tuple[Reach, ...] = ()) -> Link:
    """The link whose ring would take what all-reduces of so many ranks took: `latency` seconds of a short one, and the
    `bandwidth` of the tensor. `reached`: see Link."""
    rounds, share = 2 * (ranks - 1), 2 * (ranks - 1) / ranks
    return Link(latency / rounds, share * bandwidth, reached)
