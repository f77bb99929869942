"""A cluster as the planner sees it: devices in hosts, links in and between hosts, prices."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch

from shoal.comm import Reach
from shoal.errors import UserError

MOST_DEVICES = 1 << 17
HOST_USABLE = 0.8
"""Share of a host's memory that a plan may fill: the rest is processes, data and the system."""


def between(table: Sequence[tuple[float, float]], at: float, otherwise: float = 1.0) -> float:
    """The value at a number, from those of the next two in `table`, which ascends, by the number's logarithm; beyond
    its ends the value there, and `otherwise` without any."""
    if not table:
        return otherwise
    place = bisect_left(table, (at, 0.0))
    if place in (0, len(table)):
        return table[max(0, place - 1)][1]
    (less, low), (more, high) = table[place - 1 : place + 1]
    return low + (high - low) * math.log(at / less) / math.log(more / less)


@dataclass(frozen=True)
class Device:
    """A kind of device.

    - `flops`: peak operations a second by format ("bf16", "fp32", ...), without sparsity
    - `memory`: bytes; `bandwidth`: bytes a second of it
    - `reaches`: the share of its peak that large products reach; `streams`: of its bandwidth that other operations do
    - `launch`: seconds that an operation takes at least
    - `source`: where the figures are published; "measured" for this machine
    - `on_host`: whether its memory is the host's
    - `reached`: shares of the peak that products reach by the operations of one, ascending; where it is empty all of
      them reach `reaches`
    - `backward`, `updating`: how many times longer backward and the update take than is counted
    - `crowd`: how many ranks share a core: these rates are of one while all of them compute
    - `slower`: how many times longer than measured all takes, as runs have said
    - `cold`: how many times longer Python takes that comes once between products of the model
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
    reached: tuple[tuple[float, float], ...] = ()
    backward: float = 1.0
    updating: float = 1.0
    crowd: float = 1.0
    slower: float = 1.0
    cold: float = 1.0

    def share(self, operations: float) -> float:
        """The share of its peak that a product of so many operations reaches."""
        return between(self.reached, operations, self.reaches)

    def peak(self, dtype: torch.dtype, rounded: str = "") -> float:
        """Operations a second of products in `dtype`, whose factors are `rounded` to that format first where the device
        is known to gain by it. Raises UserError where no figure is known."""
        if rounded in self.flops:
            return self.flops[rounded]
        name = FORMATS.get(dtype, str(dtype).removeprefix("torch."))
        if name not in self.flops:
            raise UserError(
                f"the peak of {self.name} in {name} is not known, only in {', '.join(self.flops)}: take another "
                f"train.precision, or a cluster file with flops = {{{name} = ...}}, operations a second, in [[hosts]]"
            )
        return self.flops[name]


FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
ROUNDED = ("tf32", "fp8")
"""Formats to which factors of products are rounded, that are stored in another."""


@dataclass(frozen=True)
class Link:
    """What a device reaches over a link: seconds of the shortest message, bytes a second in each direction. `reached`:
    what whole collectives were measured to reach; those that were not go over rings."""

    latency: float
    bandwidth: float
    reached: tuple[Reach, ...] = ()

    def seconds(self, operation: str, payload: float, ranks: int, calls: float = 1) -> float:
        """Seconds of `calls` collectives of `ranks` devices, with `payload` bytes of tensors in all: as measured, in
        other numbers of ranks as a ring of them would differ, or over a ring."""
        if ranks <= 1 or not (payload or calls):
            return 0.0
        rounds, part = self.rounds(operation, ranks), _part(operation, ranks)
        known = [each for each in self.reached if each.operation == operation]
        if not known:
            return calls * rounds * self.latency + part * payload / self.bandwidth
        near = min(known, key=lambda each: abs(math.log(each.ranks / ranks)))
        more = part / _part(operation, near.ranks)
        return near.seconds(more * payload, calls * rounds / self.rounds(operation, near.ranks))

    def times(self, factor: float) -> Link:
        """A link of so many times the bandwidth."""
        reached = tuple(replace(each, bandwidth=factor * each.bandwidth) for each in self.reached)
        return Link(self.latency, factor * self.bandwidth, reached)

    def rounds(self, operation: str, ranks: int) -> int:
        """How many messages follow each other in a collective."""
        once = operation in ("all_to_all", "exchange", "send")
        return min(1 if once else (1 + (operation == "all_reduce")) * (ranks - 1), TREE)


def _part(operation: str, ranks: int) -> float:
    """The share of a tensor that each device of a ring sends."""
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "exchange": 1.0, "send": 1.0}.get(operation, share)


RINGS = ("all_reduce", "reduce_scatter", "all_gather")
"""Collectives whose bytes several rings can share."""
TREE = 16
"""Hops of latency at most: beyond, libraries go over trees."""


@dataclass(frozen=True)
class Host:
    """`count` equal devices. `inside`: link between them; `memory`: bytes of the host; `to_host`: bytes a second of one
    device to and from the host's memory; `disk`: of the whole host to its disk and back, 0 for none, and `scratch` a
    directory there; `update`: bytes a second of the optimizer on the host; `price`: of an hour of the whole host;
    `watts`: of a device."""

    device: Device
    count: int
    inside: Link
    memory: int
    to_host: float
    disk: float = 0.0
    update: float = 100e9
    price: float = 0.0
    watts: float = 0.0
    scratch: str = "/tmp/shoal"


@dataclass(frozen=True)
class Cluster:
    """Hosts in the order of their ranks, and the link of a device to those of other hosts.

    - `overlap`: the share of computing in which communication can go on
    - `contention`: seconds by which computing takes longer for each second of communication that goes on beside it
    - `step`: seconds of a step beside what is counted; `data`: of a row that a rank reads
    - `currency`: of prices
    - `said`: what was measured, and when; `is_here`: whether it is this machine
    """

    name: str
    hosts: tuple[Host, ...]
    between: Link
    overlap: float = 0.9
    contention: float = 0.5
    step: float = 0.0
    data: float = 0.0
    currency: str = "USD"
    said: tuple[str, ...] = field(default=())
    is_here: bool = False

    def __post_init__(self) -> None:
        if not self.hosts:
            raise UserError(f"the cluster {self.name} has no hosts")
        if len({host.count for host in self.hosts}) > 1:
            raise UserError(
                f"the cluster {self.name} has hosts of different numbers of devices; ranks are laid out over equal "
                "ones: give each of [[hosts]] the same count"
            )
        if self.size > MOST_DEVICES:
            raise UserError(
                f"the cluster {self.name} has {self.size} devices, and at most {MOST_DEVICES} are planned for: give "
                "fewer hosts (number in [[hosts]]) or devices of each (count)"
            )

    def telling(self, dtype: torch.dtype, rounded: str) -> Cluster:
        """The cluster, which says of each accelerator whose rate with `rounded` factors is not known that it is taken
        to be that of `dtype`."""
        bare = [each for each in self.devices if rounded and not each.on_host and rounded not in each.flops]
        lines = (
            f"no rate of {each.name} in {rounded} is known, and that of {FORMATS[dtype]} is taken: give flops = "
            f"{{{rounded} = ...}}, operations a second, in [[hosts]] of a cluster file"
            for each in bare
        )
        return replace(self, said=(*self.said, *lines))

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
        found: list[Device] = []
        for host in self.hosts:
            if host.device not in found:
                found.append(host.device)
        return tuple(found)

    @cached_property
    def memory(self) -> int:
        """Bytes of the smallest device; where devices are parts of their host, each one's share of it."""
        return min(host.memory // host.count if host.device.on_host else host.device.memory for host in self.hosts)

    @property
    def price(self) -> float:
        """Price of an hour of all hosts."""
        return sum(host.price for host in self.hosts)

    def money(self, amount: float) -> str:
        """An amount in the cluster's currency, for a reader: "40,000 USD", "0.0123 USD"."""
        return f"{amount:{',.0f' if amount >= 1000 else '.4g'}} {self.currency}"

    def enough(self, amount: float) -> str:
        """An amount as `money`, rounded up to four digits and as --budget reads it: who gives as much gives enough."""
        digits = max(0, 3 - math.floor(math.log10(amount)))
        return f"{math.ceil(amount * 10**digits) / 10**digits:,.{digits}f} {self.currency}"

    @property
    def watts(self) -> float:
        """Watts of all devices together."""
        return sum(host.watts * host.count for host in self.hosts)

    def link(self, stride: int, ranks: int, operation: str = "all_gather") -> Link:
        """The link of a group of `ranks`, `stride` apart: that inside of hosts where the group lies within one. Else
        each of its members in a host has a ring of its own, through its own port, and takes a part of the bytes; what
        has one receiver goes through one port, and between some of its members inside of hosts."""
        if self.per_host % (stride * ranks) == 0:
            return self.inside
        members = max(1, self.per_host // stride)
        if members == 1 or self.between.reached:  # what was measured was over all ports
            return self.between
        return _through(self.between, members if operation in RINGS else 1, self.inside.bandwidth)

    @cached_property
    def inside(self) -> Link:
        """The link inside of hosts, all of which have as many devices: as slow as the slowest in each respect."""
        slow = min((host.inside for host in self.hosts), key=lambda link: link.bandwidth)
        return replace(slow, latency=max(host.inside.latency for host in self.hosts))

    @cached_property
    def streams(self) -> float:
        """Bytes a second of operations that are no products, of the slowest device."""
        return min(device.bandwidth * device.streams for device in self.devices)

    @cached_property
    def to_host(self) -> float:
        """Bytes a second of a device to and from its host, of the slowest."""
        return min(host.to_host for host in self.hosts)

    @cached_property
    def disk(self) -> float:
        """Bytes a second of a device to the disk of its host and back, of the slowest; 0 where one has none."""
        return min(host.disk / host.count for host in self.hosts)

    @cached_property
    def host_memory(self) -> float:
        """Bytes that a plan may fill of a host's memory, for each of its devices, of the smallest."""
        return HOST_USABLE * min(host.memory / host.count for host in self.hosts)

    @cached_property
    def update(self) -> float:
        """Bytes a second of the optimizer on a host, for each of its devices."""
        return min(host.update / host.count for host in self.hosts)

    def with_hosts(self, number: int) -> Cluster:
        """This cluster with so many hosts, like the first ones, and then like the last one."""
        hosts = [*self.hosts, *[self.hosts[-1]] * number][:number]
        return replace(self, hosts=tuple(hosts))


@lru_cache
def _through(link: Link, members: int, fastest: float) -> Link:
    """The link between hosts where so many devices of each use their ports together."""
    return replace(link, bandwidth=min(fastest, members * link.bandwidth))
