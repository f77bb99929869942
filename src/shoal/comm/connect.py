"""Chooses the transport that carries a group, and lets its ranks meet."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.comm.alone import Alone
from shoal.comm.device_group import DeviceGroup
from shoal.comm.hierarchical import Hierarchical
from shoal.comm.nccl import Nccl
from shoal.comm.shm import Shared
from shoal.comm.sockets import Sockets
from shoal.comm.transport import Transport, for_every_device
from shoal.device import group_backend, is_accelerator
from shoal.errors import UserError

DEVICE_TIMEOUT = timedelta(minutes=10)
"""After this time operations of accelerators give up: NCCL does not notice that a rank has died."""


def connect(
    store: dist.Store | None, rank: int, hosts: list[str], device: torch.device, timeout: timedelta
) -> Mapping[str, Transport]:
    """Returns the group's transports by device type: "cpu", and that of `device`. All its ranks call it.

    - `store`: the group's own; None for a group of one
    - `rank`: this rank in the group
    - `hosts`: for each rank of the group, what `this_host` returns there
    - `device`: the device of this rank
    - `timeout`: how long an operation waits for a rank that lives
    """
    if len(hosts) == 1:
        return for_every_device(Alone())
    assert store is not None, "ranks need a store to meet"
    transports = {"cpu": _connect_cpu(store, rank, hosts, timeout)}
    if is_accelerator(device):
        kind = Nccl if group_backend(device) == dist.Backend.NCCL else DeviceGroup
        own = dist.PrefixStore("device", store)
        transports[device.type] = kind.open(own, rank, len(hosts), device, min(timeout, DEVICE_TIMEOUT))
    return transports


def check_devices(devices: Mapping[int, tuple[torch.device, str]]) -> None:
    """Raises UserError where ranks have devices of several kinds, or two have the same one, over which no transport
    connects them. `devices`: of each rank, with its `device.hardware_id`, "" where that is not known."""
    first, (kind, _) = next(iter(devices.items()))
    seen: dict[str, int] = {}
    for rank, (device, own) in devices.items():
        if device.type != kind.type:
            raise UserError(
                f"rank {first} has {kind} and rank {rank} has {device}: all ranks need the same kind of device. Where "
                "some hosts have no GPU, hide those of the others (CUDA_VISIBLE_DEVICES=) to train on CPUs"
            )
        if own and seen.setdefault(own, rank) != rank:
            raise UserError(
                f"ranks {seen[own]} and {rank} have the same GPU ({own}): give each its own (CUDA_VISIBLE_DEVICES, "
                "LOCAL_RANK, or the scheduler's option for GPUs a task), or start fewer ranks"
            )


def this_host() -> str:
    """Returns an identifier of this host. Ranks with the same one reach each other by shared memory and loopback.

    Host names may repeat (clones of one image), and containers share a kernel but not its network: hence three parts.
    """
    parts = [socket.gethostname()]
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        lambda: str(Path("/proc/self/ns/net").readlink()),
    ):
        try:
            parts.append(read())
        except OSError:  # not Linux: the name must do
            parts.append("")
    return "/".join(parts)


def _connect_cpu(store: dist.Store, rank: int, hosts: list[str], timeout: timedelta) -> Transport:
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return _connect_inside(store, rank, len(hosts), timeout)
    flat = Sockets(dist.PrefixStore("tcp", store), rank, len(hosts), loopback=False, timeout=timeout)
    members = [[other for other, host in enumerate(hosts) if host == name] for name in names]
    if len(names) == len(hosts):
        return flat
    here = names.index(hosts[rank])
    index, local = members[here].index(rank), len(members[here])
    inside: Transport = Alone()
    if local > 1:
        inside = _connect_inside(dist.PrefixStore(f"host{here}", store), index, local, timeout)
    across = None
    if index == 0 or len({len(ranks) for ranks in members}) == 1:
        across = Sockets(dist.PrefixStore(f"place{index}", store), here, len(names), loopback=False, timeout=timeout)
    return Hierarchical(rank, members, inside, across, flat)


def _connect_inside(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Transport:
    shared = Shared.open(store, rank, size, timeout)
    return shared or Sockets(dist.PrefixStore("tcp", store), rank, size, loopback=True, timeout=timeout)
