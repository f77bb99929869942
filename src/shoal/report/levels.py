"""The bytes that a rank held in each tier of memory, by role, over a recorded step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from ..comm.wire import sent
from .jsonl import read_standing

MOMENTS = 300
"""Moments of a step in a trace at most: a line of the file then has some tens of kilobytes."""

RANKS = 8
"""Number of ranks whose traces the file has."""

TIERS = ("device", "host", "disk")

Change = tuple[float, str, str, int]
"""(Unix time, tier, role, bytes from then on)"""


@sent
@dataclass(frozen=True, kw_only=True)
class MemoryTrace:
    """The memory of one rank over one step: from `at[i]` on, `levels[tier][role][i]` bytes were held.

    at: Unix times in seconds.
    budgets: bytes, of the tiers that have a budget.
    counts_all: whether activations are included, which they are with a device tier or a GPU.
    """

    step: int
    rank: int
    at: list[float]
    levels: dict[str, dict[str, list[int]]]
    budgets: dict[str, int]
    counts_all: bool

    def total(self, tier: str) -> list[int]:
        """Returns the bytes of all roles together, at each moment."""
        return [sum(each) for each in zip(*self.levels[tier].values(), strict=True)]

    @property
    def most(self) -> int:
        """The peak of the first tier in bytes: the device where there is one."""
        return max(self.total(next(iter(self.levels))), default=0)


def memory_trace(
    step: int, rank: int, changes: Iterable[Change], budgets: Mapping[str, int], counts_all: bool
) -> MemoryTrace | None:
    """Makes the trace of `changes`, thinned to about MOMENTS moments: those of each tier's extremes and each role's
    peak.

    step, rank, budgets, counts_all: as in `MemoryTrace`.

    Roles that never held anything are left out. Returns None if nothing was held.
    """
    changes = sorted(changes, key=lambda change: change[0])
    names = sorted(
        dict.fromkeys((tier, role) for _, tier, role, size in changes if size), key=lambda name: TIERS.index(name[0])
    )
    now, at, rows = dict.fromkeys(names, 0), list[float](), list[list[int]]()
    for moment, tier, role, size in changes:
        if (tier, role) in now:
            now[tier, role] = size
            if at and at[-1] == moment:
                rows[-1] = list(now.values())
            else:
                at.append(moment)
                rows.append(list(now.values()))
    if not names:
        return None
    kept = _kept(rows, [tier for tier, _ in names])
    levels: dict[str, dict[str, list[int]]] = {}
    for column, (tier, role) in enumerate(names):
        levels.setdefault(tier, {})[role] = [rows[i][column] for i in kept]
    return MemoryTrace(
        step=step,
        rank=rank,
        at=[round(at[i], 6) for i in kept],
        levels=levels,
        budgets={tier: size for tier, size in budgets.items() if tier in levels},
        counts_all=counts_all,
    )


def _kept(rows: Sequence[Sequence[int]], tiers: Sequence[str]) -> list[int]:
    """Returns the indices of the `rows` (bytes of each role at a moment) to keep. `tiers`: the tier of each column."""
    if len(rows) <= MOMENTS:
        return list(range(len(rows)))
    totals = [
        [sum(row[i] for i, of in enumerate(tiers) if of == tier) for row in rows] for tier in dict.fromkeys(tiers)
    ]
    totals = [total for total in totals if len(set(total)) > 1]
    keep = {0, len(rows) - 1}
    keep |= {max(range(len(rows)), key=[row[column] for row in rows].__getitem__) for column in range(len(tiers))}
    stretch = math.ceil(len(rows) / max(1, (MOMENTS - len(keep)) // (2 * max(1, len(totals)))))
    for start in range(0, len(rows), stretch):
        moments = range(start, min(start + stretch, len(rows)))
        keep |= {choose(moments, key=total.__getitem__) for total in totals for choose in (min, max)}
    return sorted(keep)


def read_memory_traces(path: Path | str) -> list[MemoryTrace]:
    """Reads the traces in `path`, the last one of each step and rank, without those of steps that were trained again;
    none when there is no such file.

    Lines of another form are left out.
    """
    names = {field.name for field in fields(MemoryTrace)}
    traces = [MemoryTrace(**line) for line in read_standing(Path(path)) if set(line) == names]
    return list({(trace.step, trace.rank): trace for trace in traces}.values())


def counter_events(traces: Sequence[MemoryTrace], origin: float) -> list[dict[str, object]]:
    """Returns the traces as counter events of a Chrome trace: a counter for each tier, stacked by role.

    origin: Unix time at which the Chrome trace begins.
    """
    return [
        {
            "ph": "C",
            "name": f"{tier} memory",
            "pid": trace.rank,
            "ts": (moment - origin) * 1e6,
            "args": {role: sizes[i] for role, sizes in roles.items()},
        }
        for trace in traces
        for tier, roles in trace.levels.items()
        for i, moment in enumerate(trace.at)
        if i == 0 or any(sizes[i] != sizes[i - 1] for sizes in roles.values())
    ]
