"""What one rank held of each memory, by role, over a recorded step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..comm.wire import sent
from .jsonl import encode_lines, open_for_append, read_lines

MOMENTS = 300
"""Of a step: a line of the file then has some tens of kilobytes, and the picture as many points as pixels in two."""

RANKS = 8
"""Of so many ranks the file has traces."""

TIERS = ("device", "host", "disk")

Change = tuple[float, str, str, int]
"""(moment, tier, role, bytes from then on)."""


@sent
@dataclass(frozen=True, kw_only=True)
class MemoryTrace:
    """From the moment `at[i]` (Unix time in seconds) on, `levels[tier][role][i]` bytes were held. `budgets`: bytes of the tiers that have one. `counts_all`:
    whether activations are among them, as where there is a device tier, or a GPU."""

    step: int
    rank: int
    at: list[float]
    levels: dict[str, dict[str, list[int]]]
    budgets: dict[str, int]
    counts_all: bool

    def total(self, tier: str) -> list[int]:
        """All roles together, at each moment."""
        return [sum(each) for each in zip(*self.levels[tier].values(), strict=True)]

    @property
    def most(self) -> int:
        """The most that a tier held at a time; of the first of them, the device where there is one."""
        return max(self.total(next(iter(self.levels))), default=0)


def memory_trace(
    step: int, rank: int, changes: Iterable[Change], budgets: Mapping[str, int], counts_all: bool
) -> MemoryTrace | None:
    """The trace of all `changes`, at most MOMENTS of them: the extremes of each tier and the peak of each role are kept, with all that was held at that
    moment. Roles that never held anything are left out. None if nothing was held."""
    changes = sorted(changes, key=lambda change: change[0])
    names = sorted(dict.fromkeys((tier, role) for _, tier, role, size in changes if size), key=lambda name: TIERS.index(name[0]))
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
    """Which of `rows` stay."""
    if len(rows) <= MOMENTS:
        return list(range(len(rows)))
    totals = [[sum(row[i] for i, of in enumerate(tiers) if of == tier) for row in rows] for tier in dict.fromkeys(tiers)]
    totals = [total for total in totals if len(set(total)) > 1]
    keep = {0, len(rows) - 1}
    keep |= {max(range(len(rows)), key=lambda i, column=column: rows[i][column]) for column in range(len(tiers))}  # type: ignore[misc]
    stretch = math.ceil(len(rows) / max(1, (MOMENTS - len(keep)) // (2 * max(1, len(totals)))))
    for start in range(0, len(rows), stretch):
        moments = range(start, min(start + stretch, len(rows)))
        keep |= {choose(moments, key=total.__getitem__) for total in totals for choose in (min, max)}
    return sorted(keep)


class MemoryLog:
    """Appends traces to `path`, one JSON object a line."""

    def __init__(self, path: Path | str) -> None:
        self._file = open_for_append(Path(path))

    def write(self, traces: Iterable[MemoryTrace]) -> None:
        self._file.write(encode_lines(map(asdict, traces)))

    def close(self) -> None:
        self._file.close()


def read_memory_traces(path: Path | str) -> list[MemoryTrace]:
    """The traces in `path`, of each step and rank the last one; none when there is no such file. Lines of another form are left out."""
    path = Path(path)
    if not path.exists():
        return []
    names = {field.name for field in fields(MemoryTrace)}
    traces = [MemoryTrace(**line) for line in read_lines(path)[0] if set(line) == names]
    return list({(trace.step, trace.rank): trace for trace in traces}.values())


def counter_events(traces: Sequence[MemoryTrace], origin: float) -> list[dict[str, object]]:
    """The traces as counters of a Chrome trace whose time begins at `origin`: one a tier, stacked by role; a point where something changes."""
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
