"""A dry run's events once more, for chunks: which are used together, which gradients are on loan, and how much of the
device that takes.

The same as the executor and the gradient_pool of `chunks/` do; tests hold them against each other to the byte.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from shoal.chunks.activations_on_host import BUFFERS as LEAVING
from shoal.chunks.activations_on_host import WORTH
from shoal.chunks.gradient_pool import BUFFERS
from shoal.chunks.spec import adds_to
from shoal.planner.layout import Laid
from shoal.planner.recording import Event, Recording


@dataclass(frozen=True)
class Replayed:
    """Bytes. `all_used`: weights of the chunks that are used at all; `together`: the most that is used together;
    `largest`: of one of them.
    `on_loan`: the most of gradients. `least`: the smallest budget of the device that would do for weights, loans and
    what the run itself keeps; `others`: the most of these without the weights."""

    all_used: int
    together: int
    largest: int
    on_loan: int
    least: int
    others: int


class _Loans:
    """Gradients on loan of `chunks`, as `exchange/reducer.py` borrows them."""

    def __init__(self, chunks: Sequence[Laid], itemsize: int) -> None:
        self._chunks, self._sizes = chunks, [chunk.size * itemsize * chunk.borrows for chunk in chunks]
        self._waiting: deque[int] = deque()
        self.held = self.most = 0

    def begin(self, stage: int | None) -> None:
        """Begins the round of a backward of `stage`, of any where that is None."""
        self._front, self._lent = 0, set[int]()
        self._left = [
            {slot.name for slot in chunk.slots} if adds_to(stage, chunk.key.stages) else set() for chunk in self._chunks
        ]

    def come(self, place: int, name: str) -> None:
        self._borrow(place)
        self._left[place].discard(name)
        self._advance()

    def end(self) -> int:
        """The round is over: what has not come is lent too, and handed over in turn. Returns the most that was on loan
        meanwhile."""
        most = self.held
        for place, left in enumerate(self._left):
            if left:
                self._borrow(place)
                left.clear()
                most = max(most, self.held)
            self._advance()
        return most

    def _borrow(self, place: int) -> None:
        if place in self._lent or not self._sizes[place]:
            return
        while len(self._waiting) >= BUFFERS:
            self.held -= self._waiting.popleft()
        self._lent.add(place)
        self.held += self._sizes[place]
        self.most = max(self.most, self.held)

    def _advance(self) -> None:
        while self._front < len(self._left) and not self._left[self._front]:
            if self._front in self._lent:
                self._waiting.append(self._sizes[self._front])
            self._front += 1


def replay(
    recording: Recording,
    chunks: Sequence[Laid],
    order: Sequence[int],
    grad_itemsize: int,
    all_memory: bool,
    on_host: float = 0.0,
    alike: bool = True,
) -> Replayed:
    """The backwards of a step, of stages in that `order` (0 where there are none), for `chunks`. `all_memory`: all
    tensors take their part of the device (a GPU's allocator), not only what backward keeps; `on_host`: the share of
    that which waits on the host; `alike`: replicas run as many microbatches as each other."""
    place_of = {slot.name: place for place, chunk in enumerate(chunks) for slot in chunk.slots}
    trainable = [chunk for chunk in chunks if chunk.key.trainable]
    turn_of = {slot.name: turn for turn, chunk in enumerate(trainable) for slot in chunk.slots}
    loans = _Loans(trainable, grad_itemsize)
    counted = "live" if all_memory else "saved"
    used: set[int] = set()
    now: frozenset[int] | None = None
    weights = together = least = others = kept = 0
    stages = [stage for stage, _ in recording.stages] or [0]
    backwards = {stage: (each, away(each, on_host)) for stage, each in zip(stages, recording.backwards, strict=True)}
    for stage in _shortened(order):
        loans.begin(stage if alike else None)
        for event, left in zip(*backwards[stage], strict=True):
            if event[0] == "use":
                own = (place_of[name] for name in event[1] if name in place_of)  # others are of other stages
                places = frozenset(place for place in own if chunks[place].passes)
                if places != now:
                    now, used = places, used | places
                    weights = sum(chunks[place].nbytes for place in places)
                    together = max(together, weights)
            elif event[0] == "came":
                loans.come(turn_of[event[1]], event[1])
            elif event[0] == counted:
                kept += event[1]
            if event[0] != "saved" or not all_memory:
                beside = kept - left + loans.held
                least, others = max(least, weights + beside), max(others, beside)
        beside = kept + loans.end()
        least, others = max(least, weights + beside), max(others, beside)
    sizes = [chunks[place].nbytes for place in used]
    return Replayed(sum(sizes), together, max(sizes, default=0), loans.most, least, others)


def _shortened(order: Sequence[int]) -> list[int]:
    """An order in which backwards follow each other as they do in `order`, each pair once: on loan from before are at
    most the last chunks of one."""
    found = list(order[:1])
    for before, after in dict.fromkeys(pairwise(order)):
        found += [after] if found[-1] == before else [before, after]
    return found


def away(events: Sequence[Event], share: float) -> list[int]:
    """After each event of a microbatch the bytes of what backward keeps that are on the host alone, where `share` of
    it waits there (see chunks/activations_on_host): what was saved first goes, but for storages that are on their way;
    in backward what is to be used next, and the storage before it, are back. What backward computes again stays. In the
    first microbatch, which goes as a whole, backward holds as much as is to stay from the next one on."""
    if not share or not events:
        return [0] * len(events)
    sizes: list[int] = [value if what == "saved" else 0 for what, value in events]  # type: ignore[misc]
    kept = list(accumulate(sizes))
    first = next((place for place, (what, _) in enumerate(events) if what == "came"), len(events))
    turn = max(range(first), key=kept.__getitem__, default=0)  # where forward ends
    whole = sum(size for size in sizes[: turn + 1] if size >= WORTH)
    goes = round(share * whole)
    found, gone, so_far, leaving = [], 0, 0, deque[int](maxlen=LEAVING)
    for size in sizes[: turn + 1]:
        so_far += size if size >= WORTH else 0
        if size >= WORTH and so_far <= goes:
            gone += size
            leaving.append(size)
        found.append(gone - sum(leaving))
    left = list(accumulate(kept[turn:], min))[1:]  # of what forward has kept
    soon = _soon([event[0] == "live" and event[1] > 0 for event in events[turn + 1 :]], [kept[turn], *left])
    return [*found, *(each - back - (whole - goes) for each, back in zip(left, soon, strict=True))]


def _soon(runs: Sequence[bool], left: Sequence[int]) -> list[int]:
    """At each event of a backward the bytes that the operation under way, or the next one, lets go, and those of one
    storage more. `runs`: whether the event is a result of an operation; `left`: bytes before and after each event."""
    found: list[int] = []
    rest = ahead = latest = 0
    ended = True
    for place in reversed(range(len(runs))):
        found.append(rest + ahead)
        if goes := left[place] - left[place + 1]:
            if ended:  # the last storage of an operation before
                rest, ahead, ended = 0, latest, False
            rest, latest = rest + goes, goes
        elif runs[place]:
            ended = True
    return found[::-1]
