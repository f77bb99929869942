"""What collectives reach: by operation, over the kinds of groups that plans make of a world's ranks, all of which are
busy at once; and what computing loses while they go on beside it. Some seconds, once for a machine.

On a CPU a call is timed as steps make it: ranks come to it from computing, one after the other, above all where there
are more of them than cores, with tensors that caches do not have, and compute again with what is there no more. Among
ranks that do nothing else it takes a fraction of that."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collectives import Group
from shoal.comm.world import World
from shoal.device import is_accelerator, kind_of, synchronize

SIZES = (2**12, 2**16, 2**20, 2**22)
"""Bytes of the tensors that are timed, in this order."""
ENOUGH, REPEATS = 0.04, 15
"""Seconds, and number, of calls of one kind after which no more are timed. After a call of so many seconds no larger
tensor is tried."""
WIDTH = 256
"""Rows and columns of the products beside which ranks communicate."""
BESIDE, PIECE, PIECES = 0.05, 2**20, 16
"""Seconds of products beside which ranks communicate for half as long, about; the bytes of each tensor that they reduce
there, and how many of them take turns, so that caches do not have them, as they have no gradients of a step."""
BETWEEN, TURNS, PAIRS = 3e-3, 5, 5
"""Seconds of products between calls, about, the number of calls, and how often these are timed with and without them,
in turn: ranks that share cores take a tenth longer or shorter from one time to the next."""


Call = Callable[[Tensor], object]
"""A collective of a tensor."""
Row = tuple[int, float]
"""Bytes of a tensor, and seconds."""


@dataclass(frozen=True)
class Reach:
    """What a collective reaches in groups of `ranks`: seconds of a short call, and bytes a second of the whole tensor
    that is reduced, gathered, scattered or sent."""

    operation: str
    ranks: int
    latency: float
    bandwidth: float

    def seconds(self, payload: float, calls: float = 1) -> float:
        """Seconds of `calls` calls with `payload` bytes in all."""
        return calls * self.latency + payload / self.bandwidth


@dataclass(frozen=True)
class Reaches:
    """What the groups of a world reach.

    - `carrier`, `hosts`, `ranks`, `on_host`: of the world: its transport, the names of its hosts, and its ranks, in all
      and on each host
    - `inside`, `across`: of groups within a host, and across hosts
    - `contention`: seconds by which computing takes longer for each second of communication beside it
    - `took`, `at`: how long measuring took, and when it was, in Unix time
    """

    carrier: str
    hosts: tuple[str, ...]
    ranks: int
    on_host: int
    inside: tuple[Reach, ...]
    across: tuple[Reach, ...]
    contention: float
    took: float
    at: float

    def __str__(self) -> str:
        whole = max((each for each in self.across or self.inside if each.operation == "all_reduce"),
                    key=lambda each: each.ranks)  # fmt: skip
        rate = f"{whole.latency * 1e6:.0f} us + {whole.bandwidth / 1e9:.3g} GB/s"
        return (
            f"an all-reduce of {whole.ranks} ranks over {self.carrier} {rate}, beside which computing loses "
            f"{self.contention:.0%} of its time"
        )

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, said: Mapping[str, Any]) -> Reaches:
        """Raises TypeError or KeyError for what was written by another version."""
        return cls(**{**said, **reached_from_wire(said), "hosts": tuple(said["hosts"])})


def reached_from_wire(said: Mapping[str, Any]) -> dict[str, tuple[Reach, ...]]:
    """Reads the fields "inside" and "across" of what collectives reach. Raises TypeError or KeyError for others."""
    return {key: tuple(Reach(**each) for each in said[key]) for key in ("inside", "across")}


def hosts_of(world: World) -> tuple[tuple[str, ...], int]:
    """The names of the hosts of a world, and into how many ranks the ranks of each of them can be grouped. A collective
    call."""
    return tuple(sorted({*world.everyone.all_gather_object(world.host)})), world.per_host


def measure_reaches(world: World) -> Reaches:
    """Measures. Every rank calls it and gets the same answer."""
    began, everyone = time.perf_counter(), world.everyone
    hosts, own = hosts_of(world)
    found: dict[bool, list[Reach]] = {False: [], True: []}
    serial, between = world.serial("measure"), _between(everyone, world.device)
    for name, ranks, across in _groups(world, own):
        group = world.group(f"measure{serial}-{name}", ranks) if len(ranks) < world.size else everyone
        for operation, call in _calls(group).items():
            rows = _rows(everyone, world.device, call)
            found[across].append(_reach(operation, group.size, *between(call, rows)))
        if group is not everyone:
            everyone.barrier()  # nobody is in it any more
            group.close()
    carrier = everyone.transports[kind_of(world.device)].carrier
    inside, across_hosts = tuple(found[False]), tuple(found[True])
    contention = _contention(world, [*inside, *across_hosts])
    took, at = everyone.broadcast_object([time.perf_counter() - began, time.time()])
    return Reaches(carrier, hosts, world.size, own, inside, across_hosts, contention, took, at)


def _groups(world: World, own: int) -> list[tuple[str, list[int], bool]]:
    """The groups of this rank that are measured, with a name, and whether they cross hosts: of neighbours in rank, and
    of those at the same place on each host of `own` ranks."""
    size, rank = world.size, world.rank
    found = []
    for number in sorted({2, own, size}):
        if 1 < number <= size and size % number == 0:
            first = rank - rank % number
            found.append((f"{number}", list(range(first, first + number)), number > own or own % number > 0))
    if 1 < own < size and size % own == 0:
        found.append(("hosts", list(range(rank % own, size, own)), True))
    return found


def _calls(group: Group) -> dict[str, Call]:
    """Each operation on a tensor, which is cut into as many parts as there are ranks."""
    size, rank = group.size, group.rank
    after, before = (rank + 1) % size, (rank - 1) % size

    def of(tensor: Tensor) -> tuple[Tensor, Tensor]:
        whole = tensor[: tensor.numel() // size * size]
        return whole, whole.view(size, -1)[rank].clone()

    def gather(tensor: Tensor) -> object:
        whole, part = of(tensor)
        return group.all_gather(whole, part, "measure")

    def scatter(tensor: Tensor) -> object:
        whole, part = of(tensor)
        return group.reduce_scatter(part, whole, "measure")

    def swap(tensor: Tensor) -> object:
        whole, _ = of(tensor)
        return group.all_to_all(torch.empty_like(whole), whole, purpose="measure")

    def send(tensor: Tensor) -> None:
        if rank % 2:
            group.recv(tensor, rank - 1, "measure")
        elif rank + 1 < size:
            group.send(tensor, rank + 1, "measure")

    return {
        "all_reduce": lambda tensor: group.all_reduce(tensor, purpose="measure"),
        "reduce_scatter": scatter,
        "all_gather": gather,
        "all_to_all": swap,
        "exchange": lambda tensor: group.exchange(torch.empty_like(tensor), before, tensor, after, "measure"),
        "send": send,
    }


def _rows(everyone: Group, device: torch.device, call: Call) -> tuple[Row, Row]:
    """Bytes and seconds of a call with the smallest and the largest tensor, on the slowest rank: all make it at
    once."""
    rows: list[Row] = []
    for nbytes in SIZES:
        tensor = torch.ones(nbytes // 4, device=device)  # pages of zeros are one page until they are written
        taken = [_timed(everyone, device, call, tensor) for _ in range(2)][1:]  # the first one opens what it needs
        while len(taken) < REPEATS and _slowest(everyone, sum(taken)) < ENOUGH:
            taken.append(_timed(everyone, device, call, tensor))
        rows.append((nbytes, _slowest(everyone, statistics.median(taken))))
        if rows[-1][1] > ENOUGH:
            break
    return rows[0], rows[-1]


def _reach(operation: str, ranks: int, short: Row, long: Row) -> Reach:
    """The line through two rows; where they are one, what that one says."""
    more = long[1] - short[1]
    rate = (long[0] - short[0]) / more if more > 0.01 * long[1] else long[0] / long[1]
    return Reach(operation, ranks, max(short[1] - short[0] / rate, 0.05 * short[1]), rate)


def _between(everyone: Group, device: torch.device) -> Callable[[Call, Sequence[Row]], list[Row]]:
    """Returns what times a call as steps make it, given its rows where ranks do nothing else: by how many seconds all
    are done later, on the slowest rank, if they make it between computing; as it is on an accelerator, whose calls
    queue."""
    if everyone.size == 1 or is_accelerator(device):
        return lambda call, rows: list(rows)
    compute, nothing = _computing(device), torch.ones(TURNS).split(1)

    def turns(products: int, call: Call = lambda _: None, tensors: Sequence[Tensor] = nothing) -> float:
        everyone.barrier()
        began = time.perf_counter()
        for tensor in tensors:
            compute(products)
            call(tensor)
        everyone.barrier()
        return _slowest(everyone, time.perf_counter() - began)

    turns(1)
    products = max(1, round(BETWEEN * TURNS / turns(1)))

    def timed(call: Call, rows: Sequence[Row]) -> list[Row]:
        short = [row for row in rows if row[1] <= ENOUGH]  # beside longer ones waiting for a core is short
        own = [torch.ones(TURNS * nbytes // 4).split(nbytes // 4) for nbytes, _ in short]
        for tensors in own:  # the first call opens what it needs
            turns(1, call, tensors)
        rounds = [(turns(products), [turns(products, call, tensors) for tensors in own]) for _ in range(PAIRS)]
        later = [statistics.median(of[place] - plain for plain, of in rounds) / TURNS for place in range(len(own))]
        found = [(nbytes, max(alone, more)) for (nbytes, alone), more in zip(short, later, strict=True)]
        return [*found, *rows[len(short) :]]

    return timed


def _computing(device: torch.device) -> Callable[[int], None]:
    """Returns what computes so many products."""
    one, other = (torch.randn(WIDTH, WIDTH, device=device) for _ in range(2))

    def compute(products: int) -> None:
        for _ in range(products):
            torch.mm(one, other)

    return compute


def _timed(everyone: Group, device: torch.device, call: Call, tensor: Tensor) -> float:
    everyone.barrier()
    began = time.perf_counter()
    call(tensor)
    synchronize(device)
    return time.perf_counter() - began


def _slowest(group: Group, seconds: float) -> float:
    return float(group.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max", purpose="measure"))


def _contention(world: World, found: Sequence[Reach]) -> float:
    """What computing loses to each second of all-reduces that a lane makes beside it, by how much later all ranks are
    done than without them; `found`: what these take alone. Above 1 where ranks share cores, which wake one more thread,
    and where what they compute with leaves the caches."""
    group, device = world.everyone, world.device
    if group.size == 1:
        return 0.0
    lane, compute = world.lane(), _computing(device)
    pieces = itertools.cycle(torch.ones(PIECES * PIECE // 4, device=device).split(PIECE // 4))

    def turn(products: int, calls: int) -> float:
        def reduces() -> None:
            for _ in range(calls):
                group.all_reduce(next(pieces), purpose="measure")

        group.barrier()
        began = time.perf_counter()
        ticket = lane.submit(reduces, "measure") if calls else None
        compute(products)
        if ticket is not None:
            ticket.wait("measure")
        synchronize(device)
        return _slowest(group, time.perf_counter() - began)

    turn(2, 1)
    each = next(of.seconds(PIECE) for of in found if (of.operation, of.ranks) == ("all_reduce", group.size))
    calls = max(1, int(BESIDE / 2 / max(turn(0, 1), each)))
    products = max(8, int(BESIDE / max(turn(8, 0) / 8, 1e-6)))
    lost = statistics.median(turn(products, calls) - turn(products, 0) for _ in range(PAIRS))
    lane.close()
    return max(0.0, lost / (calls * each))
