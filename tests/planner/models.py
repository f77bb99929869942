"""A model that was never traced: equal blocks between an embedding and a head, with round numbers."""

from __future__ import annotations

import torch

from shoal.planner.cluster import Cluster, Device, Host, Link
from shoal.planner.profile import Cut, Message, PartProfile, Profile
from shoal.planner.task import Numbers, Task
from shoal.planner.temporaries import Lives

MIB, GIB = 2**20, 2**30
BOTH = {"parts": 1.0, "tokens": 1.0}


def part(name: str, work: float, elements: float, saved: float, block: bool = True) -> PartProfile:
    """A part with so many operations a row; backward keeps `saved` bytes of a row."""
    sent = Message("parts", "all_reduce", 2, 4 * MIB, 1.0), Message("tokens", "all_to_all", 2, 4 * MIB, 1.0)
    weights = Cut(elements, {"parts": 1.0})
    none = Cut(0.0, {})
    return PartProfile(
        name,
        block,
        "block" if block else name,
        Cut(work, BOTH),
        none,
        Cut(8 * MIB, BOTH),
        Cut(10, {}),
        Cut(saved, BOTH),
        Cut(saved / 4, BOTH),
        Cut(2 * MIB, BOTH),
        weights,
        weights,
        none,
        sent if block else (),
        fused=Cut(3 * MIB, BOTH),
        kernels=Cut(4, {}),
        largest=Cut(elements * 2 / 3, {"parts": 1.0}),
        packed=Cut(10, {}),
    )


def model(blocks: int = 6, elements: float = 10e6, saved: float = 32 * MIB) -> Profile:
    """An embedding, so many blocks and a head."""
    parts = [part(f"blocks.{place}", 1e11, elements, saved) for place in range(blocks)]
    ends = part("embedding", 0.0, elements, MIB, block=False), part("head", 5e10, elements, saved, block=False)
    return Profile(
        (ends[0], *parts, ends[1]),
        Lives(*(Cut(16 * MIB, BOTH),) * 3),
        round((blocks + 2) * elements),
        {"parts": "", "tokens": "", "ring": "", "experts": "no experts"},
    )


def cluster(
    hosts: int = 2, count: int = 4, memory: float = 2 * GIB, inside: float = 50e9, between: float = 5e9
) -> Cluster:
    """So many hosts with so many devices."""
    device = Device("toy", {"bf16": 1e13}, int(memory), 5e11, reaches=0.5)
    host = Host(device, count, Link(5e-6, inside), 64 * GIB, 1e10, price=2.0)
    return Cluster("toy", (host,) * hosts, Link(2e-5, between))


def task(profile: Profile | None = None, on: Cluster | None = None, rows: int = 32, **others: object) -> Task:
    """A task whose matrices are cut in up to 4, and whose rows in up to 2."""
    legal = {"parts": 4, "tokens": 2, "ring": 0, "heads": 8}
    numbers = Numbers(torch.bfloat16, 2, 4, 4, 8)
    return Task(profile or model(), on or cluster(), rows, numbers, **{"legal": legal, **others})  # type: ignore[arg-type]
