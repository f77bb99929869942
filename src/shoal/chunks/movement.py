"""Plan of moves: which blocks of memory come and go at which tick. Pure data, from what a pass was seen to use.

A tick is a moment at which another set of blocks is needed; a trace is the ticks of a pass in order. When room is
needed, the block goes that is used again latest (Belady's rule), right after its last use. What comes instead is
fetched as early as there is room, in the order of use, so that a transfer has the time of the computation before it.
Fetching early never costs another transfer, since the rule has chosen before. (Cao, Felten, Karlin, Li: A study of
integrated prefetching and caching strategies, 1995.)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.errors import BudgetExceeded

Trace = tuple[frozenset[int], ...]


@dataclass(frozen=True)
class Tick:
    """Moves at one tick, before its blocks are used: first `release`, then `fetch`, which may be for later ticks."""

    release: tuple[int, ...]
    fetch: tuple[int, ...]


@dataclass(frozen=True)
class Planned:
    """Moves for a `trace` of blocks of `sizes` (bytes), with at most `room[tick]` bytes in memory."""

    trace: Trace
    moves: tuple[Tick, ...]
    sizes: tuple[int, ...]
    room: tuple[int, ...]

    def fetched(self) -> int:
        """Bytes that it brings in."""
        return fetched(self.moves, self.sizes)

    def fetched_otherwise(self) -> dict[str, int]:
        """Bytes that would come in by the rules of others."""
        return {
            "least recently used goes": fetched_by_recency(self.trace, self.sizes, self.room),
            "each goes after its use": fetched_and_released(self.trace, self.sizes),
        }


@dataclass
class _Stay:
    """Ticks from `start` to `stop`, both included, during which a block is in memory."""

    block: int
    start: int
    stop: int


def plan(trace: Trace, sizes: Sequence[int], capacity: int | Sequence[int], ahead: int = 1) -> tuple[Tick, ...]:
    """Plans the moves for `trace`, beginning and ending with nothing in memory.

    - `sizes[block]`: bytes
    - `capacity`: bytes in memory at a time, or at each tick
    - `ahead`: blocks on their way for later ticks at a time

    Raises BudgetExceeded for a tick that needs more than there is.
    """
    room = [capacity] * len(trace) if isinstance(capacity, int) else list(capacity)
    stays = _early(_stays(trace, sizes, room, _furthest(trace)), sizes, room, ahead)
    release: list[list[int]] = [[] for _ in trace]
    fetch: list[list[int]] = [[] for _ in trace]
    for stay in stays:
        fetch[stay.start].append(stay.block)
        if stay.stop + 1 < len(trace):
            release[stay.stop + 1].append(stay.block)
    return tuple(Tick(tuple(gone), tuple(come)) for gone, come in zip(release, fetch, strict=True))


def fetched(moves: Sequence[Tick], sizes: Sequence[int]) -> int:
    """Bytes that a plan brings in."""
    return sum(sizes[block] for tick in moves for block in tick.fetch)


def fetched_by_recency(trace: Trace, sizes: Sequence[int], capacity: int | Sequence[int]) -> int:
    """Bytes that would come in on demand, if the block went that was used longest ago (LRU)."""
    room = [capacity] * len(trace) if isinstance(capacity, int) else list(capacity)
    uses = _uses(trace)

    def longest_ago(tick: int, block: int) -> float:
        return -uses[block][bisect_right(uses[block], tick) - 1]

    return sum(sizes[stay.block] for stay in _stays(trace, sizes, room, longest_ago))


def fetched_and_released(trace: Trace, sizes: Sequence[int]) -> int:
    """Bytes that would come in if each block went after its use, as with FSDP."""
    steps = zip((frozenset(), *trace), trace, strict=False)
    return sum(sizes[block] for before, now in steps for block in now - before)


def _furthest(trace: Trace) -> Callable[[int, int], float]:
    uses = _uses(trace)

    def next_use(tick: int, block: int) -> float:
        index = bisect_right(uses[block], tick)
        return uses[block][index] if index < len(uses[block]) else math.inf

    return next_use


def _uses(trace: Trace) -> dict[int, list[int]]:
    """Ticks at which each block is used."""
    uses: dict[int, list[int]] = {}
    for tick, blocks in enumerate(trace):
        for block in blocks:
            uses.setdefault(block, []).append(tick)
    return uses


def _stays(
    trace: Trace, sizes: Sequence[int], room: Sequence[int], priority: Callable[[int, int], float]
) -> list[_Stay]:
    """Lets blocks come when they are needed; when room is, the one of highest `priority(tick, block)` goes of the
    others."""
    stays: list[_Stay] = []
    here: dict[int, _Stay] = {}
    for tick, blocks in enumerate(trace):
        missing = sorted(blocks - here.keys())
        needed = sum(sizes[block] for block in blocks)
        if needed > room[tick]:
            raise BudgetExceeded(needed, room[tick], f"blocks {sorted(blocks)} are used together")
        held = sum(sizes[block] for block in here.keys() | blocks)
        for block in sorted(here.keys() - blocks, key=lambda block: (-priority(tick, block), -sizes[block], block)):
            if held <= room[tick]:
                break
            del here[block]
            held -= sizes[block]
        for block in missing:
            here[block] = _Stay(block, tick, tick)
            stays.append(here[block])
        for block in blocks:
            here[block].stop = tick
    return stays


def _early(stays: list[_Stay], sizes: Sequence[int], room: Sequence[int], ahead: int) -> list[_Stay]:
    """Begins each stay as early as there is room, in their order, at most `ahead` blocks before they are needed."""
    held = [0] * len(room)
    coming = [0] * len(room)  # how many blocks are on their way at a tick, for later ones
    for stay in stays:
        for tick in range(stay.start, stay.stop + 1):
            held[tick] += sizes[stay.block]
    before: dict[int, _Stay] = {}
    kept: list[_Stay] = []
    earliest = 0
    for stay in stays:
        size, last = sizes[stay.block], before.get(stay.block)
        while (
            stay.start > max(earliest, last.stop + 1 if last else 0)
            and held[stay.start - 1] + size <= room[stay.start - 1]
            and coming[stay.start - 1] < ahead
        ):
            stay.start -= 1
            held[stay.start] += size
            coming[stay.start] += 1
        earliest = stay.start
        if last is not None and last.stop + 1 == stay.start:  # it need not go
            last.stop = stay.stop
            continue
        before[stay.block] = stay
        kept.append(stay)
    return kept
