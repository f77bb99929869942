"""What the planner is asked: a model's profile, the batch, number formats, the optimizer's state, a cluster, what is
pinned; and what it answers: candidates with their terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from shoal.chunks import budget
from shoal.plan import Option, Plan
from shoal.planner.cluster import Cluster
from shoal.planner.degrees import PINS, Spread
from shoal.planner.pipes import Pace
from shoal.planner.profile import Profile

TERMS = (
    "compute",
    "parts",
    "tokens",
    "experts",
    "copies",
    "stages",
    "bubble",
    "offload",
    "optimizer",
    "data",
    "other",
)
"""What the seconds of a step are made of: products and all else that a device computes; communication that is not
hidden, by what its ranks divide; waiting in a pipeline; moves between tiers; the update; reading data; the rest."""
NAMES = {
    "compute": "compute",
    "parts": "tensor-parallel communication",
    "tokens": "context-parallel communication",
    "experts": "expert-parallel communication",
    "copies": "data-parallel communication",
    "stages": "pipeline communication",
    "bubble": "pipeline bubble",
    "offload": "offload",
    "optimizer": "optimizer",
    "data": "data loading",
    "other": "other",
}
"""The terms for a reader, wherever they are shown; JSON has the short ones as keys."""
ROLES = (
    "weights",
    "gradients",
    "masters",
    "optimizer state",
    "weights in use",
    "gradients on loan",
    "activations",
    "temporaries",
)


@dataclass(frozen=True)
class Numbers:
    """Bytes of an element: of weights and what a model computes with (`weight`), gradients, masters (0 where the
    weights are) and the optimizer's state. `dtype`: of products; `rounded`: the format of their factors, where that is
    another ("tf32", or "fp8" of linear layers)."""

    dtype: torch.dtype
    weight: int
    gradient: int
    master: int
    state: float
    rounded: str = ""


class Probed(NamedTuple):
    """Rows of a microbatch, and how many times longer than counted its forward and its backward take, and what backward
    computes again, of some operations of the blocks and of all."""

    rows: int
    forward: float
    backward: float
    some: float
    full: float


EXACT = "allreduce"
"""The exchange that changes nothing of what is computed."""


@dataclass(frozen=True)
class Task:
    """What is asked.

    - `rows`: of a global batch; `microbatch`: rows of one forward, None where the planner may choose; `whole`: where it
      is given, all rows of a replica are one, however many that are
    - `steps`: of the whole job, None where that is not known
    - `pins`: fields of the plan that are given
    - `legal`: numbers that degrees have to divide ("parts", "tokens", "experts", "heads"), a missing one is 1
    - `limit`: bytes that a rank may use of its device; by default USABLE of the cluster's memory
    - `share`: of these, what estimates may fill: below 1 where dry runs have counted more than they (see confirm)
    - `recompute`, `schedules`: those that are tried
    - `exchanges`: algorithms by which replicas may agree, by name
    - `probed`: how many times longer than counted what a model computes takes, by the rows of a microbatch (see probe)
    - `compiled`: whether compiled blocks are tried beside those that run as they are written
    - `selective`: whether compiled blocks can keep what some operations give (see compiled)
    - `optimizer`: makes a small one of the kind used, by which some exchanges go
    """

    profile: Profile
    cluster: Cluster
    rows: int
    numbers: Numbers
    microbatch: int | None = None
    steps: int | None = None
    pins: Mapping[str, Any] = field(default_factory=dict)
    legal: Mapping[str, int] = field(default_factory=dict)
    limit: float | None = None
    share: float = 1.0
    recompute: tuple[str, ...] = ("none", "selective", "full")
    schedules: tuple[tuple[str, int], ...] = (
        ("1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 4),
        ("zb1p", 1),
        ("zbv", 2),
    )
    exchanges: tuple[str, ...] = (EXACT,)
    probed: tuple[Probed, ...] = ()
    compiled: bool = False
    selective: bool = True
    optimizer: Callable[[], torch.optim.Optimizer] | None = None
    whole: bool = False

    @property
    def usable(self) -> float:
        """Bytes that a rank may use of its device."""
        return self.limit if self.limit is not None else USABLE * self.cluster.memory

    @property
    def most(self) -> float:
        """Bytes of these that estimates may fill."""
        return self.share * self.usable


MIB = 2**20


class Offload(NamedTuple):
    """Weights, masters and optimizer state at home on the host, as `plan.memory` says. Bytes of a rank: what it may use
    of its `device` and of its `host`, None for no limit; `disk`: the directory of what the host does not hold, None
    for none; `activations`: the share of them that waits on the host."""

    device: float | None = None
    host: float | None = None
    disk: str | None = None
    activations: float = 0.0

    @classmethod
    def of(cls, option: Option, most: float) -> Offload:
        """What a plan's `memory` says; "auto" is `most`. Raises UserError for what it says wrong."""
        if option == "auto":
            return cls(most)
        said = budget(option, torch.device("cpu"))
        assert said is not None
        wants = isinstance(option, Mapping) and option.get("device") == "auto"
        disk = None if said.disk is None else str(said.disk.path)
        return cls(most if wants else said.device, said.host, disk, said.activations)

    def table(self) -> dict[str, Any]:
        """The plan's `memory`; less rather than more."""
        limits = {"device": self.device, "host": self.host}
        said: dict[str, Any] = {key: _rounded(nbytes) for key, nbytes in limits.items() if nbytes is not None}
        if self.disk is not None:
            said["disk"] = self.disk
        return said | ({"activations": self.activations} if self.activations else {})


def _rounded(nbytes: float) -> str:
    """Whole MiB, or KiB where that would leave out much."""
    return f"{int(nbytes / MIB)}MiB" if nbytes >= 2**30 else f"{int(nbytes / 2**10)}KiB"


USABLE = 0.92
"""Share of a device's memory that a plan may fill: the rest is the driver's and the allocator's."""


class Choice(NamedTuple):
    """A point of the search space. `shard`: ranks of `spread.copies` that share one copy of the state; `chunks`: stages
    of a rank; `offload`: what is at home on the host, None where nothing is; `exchange`: how replicas agree; `compile`:
    whether blocks are compiled. What prices find of it: `stages`, blocks of each stage; `recompute`; and `shares` of
    the replicas."""

    spread: Spread
    microbatch: int
    zero: int = 0
    shard: int | None = None
    recompute: Option = "none"
    schedule: str = "1f1b"
    chunks: int = 1
    offload: Offload | None = None
    exchange: str = EXACT
    compile: bool = False
    stages: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()

    @property
    def on_device(self) -> float:
        """The share of what backward keeps that waits on the device."""
        return 1.0 - (self.offload.activations if self.offload else 0.0)

    def plan(self, pins: Mapping[str, Any]) -> Plan:
        """The plan as a job file has it, with what was pinned beside the search."""
        others: dict[str, Any] = {"zero": self.zero, "recompute": self.recompute}
        if self.shard not in (None, self.spread.copies):
            others["shard"] = self.shard
        if self.shares:
            others["shares"] = self.shares
        if self.spread.stages > 1:
            usual = {"interleaved": 2, "zbv": 2}.get(self.schedule, 1)
            named: Any = self.schedule
            others["schedule"] = named if usual == self.chunks else {"name": named, "chunks": self.chunks}
            others["stages"] = list(self.stages)
        if self.offload:
            others["memory"] = self.offload.table()
        if self.exchange != EXACT:
            others["exchange"] = self.exchange
        if self.compile:
            others["compile"] = True
        kept = {key: value for key, value in pins.items() if key not in (*PINS, "context")}
        found = self.spread.plan(**{**others, **kept})
        return replace(found, context=pins["context"]) if "context" in pins else found


@dataclass(frozen=True)
class Estimate:
    """A choice with what it costs: `terms` in seconds of a step, `memory` in bytes of the fullest rank by role, on the
    device, and `on_host` and `on_disk` of it at home there; `wire`: bytes that a rank sends in a step, by what its
    ranks divide; `microbatches` of the replica that takes longest. Of each stage `again`: how many blocks are treated
    in each way, and `stages`: what a microbatch takes of it; `message`: seconds of one between two. `forward`,
    `backward`: the parts of computing that forwards are, and backwards but for what they compute again and what halves
    of them take beside; `moving`: seconds in which something travels to the host and back, hidden or not; `fullest`:
    the place along the pipeline of the fullest rank."""

    choice: Choice
    terms: Mapping[str, float]
    memory: Mapping[str, float]
    on_host: float
    on_disk: float
    wire: Mapping[str, float]
    microbatches: int
    again: tuple[Mapping[str, int], ...] = ()
    stages: tuple[Pace, ...] = ()
    message: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    moving: float = 0.0
    fullest: int = 0

    @property
    def places(self) -> list[int]:
        """The ranks along the pipeline whose memory dry runs confirm: the first two, the last, and the fullest."""
        last = self.choice.spread.stages - 1
        return sorted({0, min(1, last), last, self.fullest})

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return math.fsum(self.terms.values())

    @property
    def bytes(self) -> float:
        """Bytes that the fullest rank takes of its device."""
        return math.fsum(self.memory.values())


@dataclass(frozen=True)
class Found:
    """What a search gives: candidates from the fastest on, how many choices were priced, how many degrees were looked
    at and how many of them were left out by their bound; and, where nothing fits, the choice that lacks least."""

    best: tuple[Estimate, ...]
    priced: int
    spreads: int
    bounded: int
    nearest: Estimate | None
