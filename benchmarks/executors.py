"""Other rules by which weights may come and go, and a link of a given rate: contenders of `offload`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from shoal.chunks.chunk import Chunk
from shoal.chunks.executor import Executor
from shoal.chunks.movement import Tick, Trace


class Planned(Executor):
    """Shoal's own, which says what it has recorded. `room`: bytes for weights at each tick of the trace."""

    room: list[int]

    @property
    def sizes(self) -> Sequence[int]:
        return self._sizes

    @property
    def recorded(self) -> tuple[Trace, tuple[Tick, ...]]:
        """The trace of the last kind of pass, and its moves."""
        last = list(self._plans.values())[-1]
        return last.trace, last.moves

    @property
    def others(self) -> int:
        """The most that all else in the tier took at a time."""
        return max(self._others)

    def _room(self, trace: Trace) -> list[int]:
        self.room = super()._room(trace)
        return self.room


class OnDemand(Planned):
    """Each weight comes when it is asked for; what was used longest ago goes when room is needed (LRU)."""

    def use(self, wanted: Iterable[int]) -> None:
        plan, self._follows = self._follows, None
        try:
            super().use(wanted)
        finally:
            self._follows = plan


class FetchAndRelease(Planned):
    """Each weight goes right after its use, and the one that is needed next comes meanwhile, as with FSDP."""

    def end(self) -> None:
        super().end()
        self._plans = {
            key: replace(each, moves=fetch_and_release(each.trace, self._sizes, self.room))
            for key, each in self._plans.items()
        }


def fetch_and_release(trace: Trace, sizes: Sequence[int], room: Sequence[int]) -> tuple[Tick, ...]:
    """At each tick the blocks of the one before go, and those of the next come, if there is room for both."""
    ticks = []
    here: frozenset[int] = frozenset()
    for now, after, bytes_now in zip(trace, (*trace[1:], frozenset()), room, strict=True):
        come = now - here
        ahead = after - now if sum(sizes[block] for block in now | after) <= bytes_now else frozenset()
        ticks.append(Tick(tuple(sorted(here - now)), (*sorted(come), *sorted(ahead))))
        here = now | ahead
    return tuple(ticks)


def throttled(chunks: Iterable[Chunk], rate: float) -> None:
    """From now on the weights of `chunks` come as over a link of `rate` bytes a second."""
    for chunk in chunks:
        chunk.fill = _at(rate, chunk, chunk.fill)  # type: ignore[method-assign]


def _at(rate: float, chunk: Chunk, fill: Callable[[], None]) -> Callable[[], None]:
    def slowly() -> None:
        if chunk.before_fill is not None:  # an update that is under way: no time of the link
            chunk.before_fill(chunk)
        began = time.perf_counter()
        fill()
        time.sleep(max(0.0, chunk.nbytes_whole / rate - (time.perf_counter() - began)))

    return slowly


RULES: dict[str, type[Planned]] = {"planned": Planned, "on demand": OnDemand, "fetch and release": FetchAndRelease}
