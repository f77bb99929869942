"""A cluster as the planner sees it: devices in hosts, links in and between hosts, prices. Read from TOML, or named.

8xh100, h200x64             hosts of eight of that machine; x64 after the name counts devices too
cluster.toml                [[hosts]] device = "h100", count = 8, number = 2, price = 24.0; [between] bandwidth = ...
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from shoal.errors import UserError, check_names, did_you_mean
from shoal.plan import nbytes

MOST_DEVICES = 1 << 17


@dataclass(frozen=True)
class Device:
    """A kind of device.

    - `flops`: peak operations a second by format ("bf16", "fp32", ...), without sparsity
    - `memory`: bytes; `bandwidth`: bytes a second of it
    - `reaches`: the share of its peak that large products reach; `streams`: of its bandwidth that other operations do
    - `launch`: seconds that an operation takes at least
    - `source`: where the figures are published; "measured" for this machine
    - `on_host`: whether its memory is the host's
    """

    name: str
    flops: Mapping[str, float]
    memory: int
    bandwidth: float
    reaches: float = 0.7
    streams: float = 0.8
    launch: float = 4e-6
    source: str = ""
    on_host: bool = False

    def peak(self, dtype: torch.dtype) -> float:
        """Operations a second of products in `dtype`. Raises UserError where no figure is known."""
        name = FORMATS.get(dtype, str(dtype).removeprefix("torch."))
        if name not in self.flops:
            raise UserError(f"of {self.name} the peak in {name} is not known: it has {', '.join(self.flops)}")
        return self.flops[name]


FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class Link:
    """What a device reaches over a link: seconds of the shortest message, bytes a second in each direction."""

    latency: float
    bandwidth: float

    def seconds(self, operation: str, payload: float, ranks: int, calls: float = 1) -> float:
        """Seconds of `calls` collectives over a ring of `ranks` devices, with `payload` bytes of tensors in all."""
        if ranks <= 1 or not (payload or calls):
            return 0.0
        share = (ranks - 1) / ranks
        part = {"all_reduce": 2 * share, "exchange": 1.0, "send": 1.0}.get(operation, share)
        return calls * self.rounds(operation, ranks) * self.latency + part * payload / self.bandwidth

    def rounds(self, operation: str, ranks: int) -> int:
        """How many messages follow each other in a collective."""
        once = operation in ("all_to_all", "exchange", "send")
        return min(1 if once else (1 + (operation == "all_reduce")) * (ranks - 1), TREE)


RINGS = ("all_reduce", "reduce_scatter", "all_gather")
"""Collectives whose bytes several rings can share."""
TREE = 16
"""Hops of latency at most: beyond, libraries go over trees."""


@dataclass(frozen=True)
class Host:
    """`count` equal devices. `inside`: link between them; `memory`: bytes of the host; `to_host`: bytes a second of one
    device to and from the host's memory; `disk`: the same for the disk, 0 for none; `update`: bytes a second of the
    optimizer on the host; `price`: of an hour of the whole host; `watts`: of a device."""

    device: Device
    count: int
    inside: Link
    memory: int
    to_host: float
    disk: float = 0.0
    update: float = 100e9
    price: float = 0.0
    watts: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Hosts in the order of their ranks, and the link of a device to those of other hosts.

    - `overlap`: the share of computing in which communication can go on
    - `contention`: seconds by which computing takes longer for each second of communication that goes on beside it
    - `step`: seconds of a step beside what is counted
    - `currency`: of prices
    """

    name: str
    hosts: tuple[Host, ...]
    between: Link
    overlap: float = 0.9
    contention: float = 0.5
    step: float = 0.0
    currency: str = "USD"
    said: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.hosts:
            raise UserError(f"the cluster {self.name} has no hosts")
        if len({host.count for host in self.hosts}) > 1:
            raise UserError(
                f"the cluster {self.name} has hosts of different numbers of devices; ranks are laid out over equal ones"
            )
        if self.size > MOST_DEVICES:
            raise UserError(f"the cluster {self.name} has {self.size} devices: at most {MOST_DEVICES} are planned for")

    @cached_property
    def size(self) -> int:
        """Number of devices."""
        return sum(host.count for host in self.hosts)

    @cached_property
    def per_host(self) -> int:
        """Devices of the smallest host."""
        return min(host.count for host in self.hosts)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The kinds of devices."""
        return tuple({host.device.name: host.device for host in self.hosts}.values())

    @cached_property
    def memory(self) -> int:
        """Bytes of the smallest device; where devices are parts of their host, each one's share of it."""
        return min(host.memory // host.count if host.device.on_host else host.device.memory for host in self.hosts)

    @property
    def price(self) -> float:
        """Of an hour of all hosts."""
        return sum(host.price for host in self.hosts)

    @property
    def watts(self) -> float:
        """Of all devices."""
        return sum(host.watts * host.count for host in self.hosts)

    def link(self, stride: int, ranks: int, operation: str = "all_gather") -> Link:
        """The link of a group of `ranks`, `stride` apart: that inside of hosts where the group lies within one. Else
        each of its members in a host has a ring of its own, through its own port, and takes a part of the bytes; what
        has one receiver goes through one port."""
        if self.per_host % (stride * ranks) == 0:
            return self._inside
        members = max(1, self.per_host // stride) if operation in RINGS else 1
        bandwidth = min(self._inside.bandwidth, members * self.between.bandwidth) if members > 1 else None
        return self.between if bandwidth is None else replace(self.between, bandwidth=bandwidth)

    @cached_property
    def _inside(self) -> Link:
        """The slowest of the links inside of hosts, all of which have as many devices."""
        return min((host.inside for host in self.hosts), key=lambda link: link.bandwidth)

    @cached_property
    def to_host(self) -> float:
        """Bytes a second of a device to and from its host, of the slowest."""
        return min(host.to_host for host in self.hosts)

    @cached_property
    def update(self) -> float:
        """Bytes a second of the optimizer on a host, for each of its devices."""
        return min(host.update / host.count for host in self.hosts)

    def with_hosts(self, number: int) -> Cluster:
        """This cluster with so many hosts, like the first ones, and then like the last one."""
        hosts = [*self.hosts, *[self.hosts[-1]] * number][:number]
        return replace(self, hosts=tuple(hosts))


NAMED = re.compile(r"(?:(?P<number>\d+)x)?(?P<name>[a-z0-9]*?[a-z][a-z0-9]*?)(?:x(?P<total>\d+))?")


def cluster_of(text: str, machines: Mapping[str, Host], between: Link) -> Cluster:
    """Reads `text`: the path of a cluster file, or a name such as "8xh100", "h100x64". Raises UserError otherwise."""
    if text.endswith(".toml"):
        return read_cluster(Path(text), machines, between)
    found = NAMED.fullmatch(text.lower())
    known = [] if found is None else [name for name in machines if name == found["name"]]
    if found is None or not known or (found["number"] and found["total"]):
        name = "" if found is None else found["name"]
        raise UserError(
            f'"{text}" is no machine.{did_you_mean(name, list(machines))} Give 8xNAME or NAMEx64 (devices) with one of '
            f"{', '.join(machines)}, or the path of a cluster file, *.toml"
        )
    host, devices = machines[known[0]], int(found["total"] or found["number"] or machines[known[0]].count)
    if devices < 1 or (devices > host.count and devices % host.count):
        raise UserError(f'"{text}": hosts of {known[0]} have {host.count} devices, so more are a multiple of that')
    if devices <= host.count:
        hosts: tuple[Host, ...] = (replace(host, count=devices, price=host.price * devices / host.count),)
    else:
        hosts = (host,) * (devices // host.count)
    return Cluster(text, hosts, between)


def read_cluster(path: Path, machines: Mapping[str, Host], between: Link) -> Cluster:
    """Reads a cluster file. Raises UserError for an unknown key, or a value of another kind."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no such cluster file: {path} (from {Path.cwd()})") from None
    except (OSError, ValueError) as error:
        raise UserError(f"the cluster file {path} cannot be read: {error}") from error
    check_names(
        f"{path} has no key", content, ["hosts", "between", "overlap", "contention", "step", "currency"], "Keys"
    )
    tables = content.get("hosts")
    if not isinstance(tables, list) or not tables or not all(isinstance(each, Mapping) for each in tables):
        raise UserError(f'{path} describes no hosts: give [[hosts]] with device = "h100", count = 8, number = 2')
    hosts = [host for table in tables for host in _hosts(dict(table), str(path), machines)]
    others = {key: content[key] for key in ("overlap", "contention", "step") if key in content}
    for key, value in others.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise UserError(f"{path}: {key} = {value!r}: give a number that is not negative")
    link = _link(content.get("between", {}), f"{path}: between", between)
    return Cluster(path.stem, tuple(hosts), link, currency=str(content.get("currency", "USD")), **others)


def _hosts(table: dict[str, Any], where: str, machines: Mapping[str, Host]) -> list[Host]:
    """The hosts of one [[hosts]] table: a machine by name, with what is said otherwise."""
    own = ("name", "flops", "bandwidth", "reaches", "streams", "launch", "source")
    keys = ["device", "number", "device_memory", *own, *(each.name for each in fields(Host) if each.name != "device")]
    check_names(f"{where}: hosts has no key", table, keys, "Keys")
    name, number = table.pop("device", None), table.pop("number", 1)
    if name not in machines:
        raise UserError(
            f"{where}: hosts.device = {name!r}: give one of {', '.join(machines)}, the nearest to yours, and what "
            "differs beside it (flops, device_memory, bandwidth, ...)"
        )
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise UserError(f"{where}: hosts.number = {number!r}: give a whole number of at least 1")
    host = machines[name]
    changed = {key: table.pop(key) for key in own if key in table}
    if "device_memory" in table:
        changed["memory"] = nbytes(table.pop("device_memory"), f"{where}: hosts.device_memory")
    if "inside" in table:
        table["inside"] = _link(table["inside"], f"{where}: hosts.inside", host.inside)
    if "memory" in table:
        table["memory"] = nbytes(table["memory"], f"{where}: hosts.memory")
    for key, value in {**table, **changed}.items():
        if key in ("inside", "name", "source", "flops"):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise UserError(f"{where}: hosts.{key} = {value!r}: give a number that is not negative")
    if "flops" in changed and not isinstance(changed["flops"], Mapping):
        raise UserError(
            f"{where}: hosts.flops = {changed['flops']!r}: give a table by format, such as {{bf16 = 9.9e14}}"
        )
    changed.setdefault("name", name if not changed else f"{name}, changed by {where}")
    return [replace(host, device=replace(host.device, **changed), **table)] * number


def _link(table: Any, what: str, default: Link) -> Link:
    if not isinstance(table, Mapping):
        raise UserError(f"{what} = {table!r}: give a table with latency (s) and bandwidth (bytes/s each way)")
    check_names(f"{what} has no key", table, ["latency", "bandwidth"], "Keys")
    values = {"latency": default.latency, "bandwidth": default.bandwidth, **table}
    for key, value in values.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value < 0
            or (key == "bandwidth" and not value)
        ):
            raise UserError(f"{what}.{key} = {value!r}: give a number above 0")
    return Link(float(values["latency"]), float(values["bandwidth"]))
