"""A dry run's events once more, for chunks: which are used together, which gradients are on loan, and how much of the
device that takes.

The same as the executor and the gradient_pool of `chunks/` do; tests hold them against each other to the byte.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.chunks.gradient_pool import BUFFERS
from shoal.planner.layout import Laid
from shoal.planner.recording import Recording


@dataclass(frozen=True)
class Replayed:
    """Bytes. `all_used`: weights of the chunks that are used at all; `together`: the most that is used together;
    `largest`: of one of them.
    `on_loan`: the most of gradients. `least`: the smallest budget of the device that would do for weights, loans and
    what the run itself keeps."""

    all_used: int
    together: int
    largest: int
    on_loan: int
    least: int


class _Loans:
    """Gradients on loan in a round: as `exchange/reducer.py` borrows them, of `sizes[place]` bytes, 0 of a chunk that
    does not borrow."""

    def __init__(self, sizes: Sequence[int], missing: Sequence[set[str]]) -> None:
        self._sizes, self._missing = sizes, missing
        self._waiting: deque[int] = deque()
        self.held = self.most = 0
        self.begin()

    def begin(self) -> None:
        self._front, self._lent, self._left = 0, set[int](), [set(names) for names in self._missing]

    def come(self, place: int, name: str) -> None:
        self._borrow(place)
        self._left[place].discard(name)
        self._advance()

    def end(self) -> None:
        """The round is over: what has not come is lent too, and handed over."""
        for place, left in enumerate(self._left):
            if left:
                self._borrow(place)
                left.clear()
        self._advance()
        self.begin()

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
            if self._sizes[self._front]:
                self._waiting.append(self._sizes[self._front])
            self._front += 1


def replay(
    recording: Recording, chunks: Sequence[Laid], microbatches: int, grad_itemsize: int, all_memory: bool
) -> Replayed:
    """`microbatches` of a step, for `chunks`. `all_memory`: all tensors take their part of the device (a GPU's
    allocator), not only what backward keeps."""
    place_of = {slot.name: place for place, chunk in enumerate(chunks) for slot in chunk.slots}
    trainable = [chunk for chunk in chunks if chunk.key.trainable]
    turn_of = {slot.name: turn for turn, chunk in enumerate(trainable) for slot in chunk.slots}
    loans = _Loans(
        [chunk.size * grad_itemsize * chunk.borrows for chunk in trainable],
        [{slot.name for slot in chunk.slots} for chunk in trainable],
    )
    counted = "live" if all_memory else "saved"
    used: set[int] = set()
    now: frozenset[int] | None = None
    weights = together = least = kept = 0
    for _ in range(min(microbatches, 2)):  # a third is as the second
        for event in recording.events:
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
                least = max(least, weights + kept + loans.held)
        loans.end()
        least = max(least, weights + kept + loans.held)
    sizes = [chunks[place].nbytes for place in used]
    return Replayed(sum(sizes), together, max(sizes, default=0), loans.most, least)
