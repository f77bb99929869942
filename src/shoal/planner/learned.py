"""What a run has said of this machine (`shoal plan --compare`), kept for the predictions to come: by device, format,
and ranks in all and on each host, so that no other machine or cluster reads it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from shoal.comm import Reach
from shoal.comm.reaches import reached_from_wire
from shoal.planner.cluster import Link
from shoal.planner.kept import keep, key_of, read, threads_of

LEAST, MOST = 0.25, 20.0
"""What is learned is within so many times of what was measured; else something else was the matter with the run."""
LARGE = 2**16
"""Bytes from which a call says what a link's bandwidth is."""


@dataclass(frozen=True)
class Learned:
    """What a run said of this machine.

    - `forward`, `backward`, `update`: how many times longer they took than is counted of the measured rates
    - `other`, `data`: seconds of a step beside what is counted, and of a row that a rank reads
    - `inside`, `across`: what collectives reached, within a host and across hosts
    - `run`, `at`: the run's folder, and when it was compared, in Unix time
    """

    forward: float
    backward: float
    update: float
    other: float
    data: float
    inside: tuple[Reach, ...]
    across: tuple[Reach, ...]
    run: str
    at: float

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d", time.localtime(self.at))
        links = sorted({each.operation for each in (*self.inside, *self.across)})
        also = f"; rates of {', '.join(links)}" if links else ""
        return (
            f"forward takes {self.forward:.3g} times what was measured, backward {self.backward:.3g}, the update "
            f"{self.update:.3g}{also}: learned from {self.run} on {when}"
        )


def learned(device: torch.device, dtype: torch.dtype, ranks: int, on_host: int, hosts: Sequence[str]) -> Learned | None:
    """What was last learned for this device, format, number of ranks and these hosts; None where that is nothing, or
    too old."""
    found = read(_key(device, dtype, ranks, on_host, hosts))
    with suppress(KeyError, TypeError):
        if found is not None:
            return Learned(**{**found, **reached_from_wire(found)})
    return None


def learn(
    device: torch.device, dtype: torch.dtype, ranks: int, on_host: int, hosts: Sequence[str], found: Learned
) -> None:
    """Keeps `found` for the next prediction, in place of what was learned before."""
    keep(_key(device, dtype, ranks, on_host, hosts), asdict(found))


def _key(device: torch.device, dtype: torch.dtype, ranks: int, on_host: int, hosts: Sequence[str]) -> str:
    return key_of("learned", device, dtype, threads_of(device, on_host), ranks, on_host, *hosts)


def is_plausible(factor: float) -> bool:
    """Whether a ratio to what was measured may be kept."""
    return LEAST <= factor <= MOST


def reaches_of(steps: Sequence[Sequence[Mapping[str, Any]]], across: bool, link: Link) -> tuple[Reach, ...]:
    """What collectives reached, from the calls of recorded steps (see report/changes.py). A call's seconds are the
    median over steps; a line goes through those of the smallest and the largest tensor. Of an operation of which no
    call had LARGE bytes nothing is said. `link`: what was predicted; what differs from it by more than is plausible is
    left out."""
    taken: dict[tuple[str, int], dict[int, list[float]]] = {}
    for calls in steps:
        for row in calls:
            if row["across"] == across and row["seconds"] > 0:
                sizes = taken.setdefault((row["operation"], row["ranks"]), {})
                sizes.setdefault(row["payload"], []).append(row["seconds"])
    found = []
    for (operation, ranks), sizes in sorted(taken.items()):
        rows = sorted((payload, median(seconds)) for payload, seconds in sizes.items())
        (short, least), (long, most) = rows[0], rows[-1]
        if long < LARGE or not is_plausible(most / link.seconds(operation, long, ranks)):
            continue
        if long >= 4 * short and most > least:
            rate = (long - short) / (most - least)
            found.append(Reach(operation, ranks, max(0.0, least - short / rate), rate))
        else:  # one size: the latency stays
            latency = min(link.seconds(operation, 0.0, ranks), most / 2)
            found.append(Reach(operation, ranks, latency, long / (most - latency)))
    return tuple(found)


def newest(reaches: Iterable[Reach]) -> tuple[Reach, ...]:
    """The last of `reaches` of each operation and number of ranks."""
    known = {(each.operation, each.ranks): each for each in reaches}
    return tuple(known[key] for key in sorted(known))
