"""A machine in virtual time for an Executor: blocks that know what may be done to them, and a link that copies one
after the other, a byte a tick of the clock.

none --open--> room --fill--> there, when the link has brought it --let_go--> none
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.chunks.executor import Executor
from shoal.chunks.movement import Trace
from shoal.chunks.tier import MOVING, Tier

LEGAL = {("none", "open"): "room", ("room", "fill"): "there", ("there", "let_go"): "none"}


class Machine:
    """`now` is the computation's time; the link is free at `free_at` and has `copied` so many bytes. The computation
    waited `stalled` ticks of the last pass. `in_use`: the blocks that are computed with now."""

    def __init__(self, sizes: Sequence[int], capacity: int | None = None) -> None:
        self.now = self.free_at = self.copied = self.stalled = 0
        self.tier = Tier("device", capacity)
        self.in_use: frozenset[int] = frozenset()
        self.blocks = [Block(self, place, size) for place, size in enumerate(sizes)]

    # what an executor asks of a lane

    def submit(self, work: Callable[[], None], name: str = "") -> Arrival:
        work()
        return Arrival(self, self.free_at)

    def drain(self) -> None:
        self.now = max(self.now, self.free_at)

    # what a computation does

    def run(self, executor: Executor, trace: Trace, compute: Sequence[int], others: Sequence[int] | None = None) -> int:
        """One pass; each tick computes so long, and others take so much of the tier until the next one has begun.
        Returns how long it took."""
        began, self.stalled, held = self.now, 0, 0
        self.tier.take("others", 0)
        executor.begin("pass")
        for used, seconds, size in zip(trace, compute, others or [0] * len(trace), strict=True):
            before = self.now
            self.in_use = used
            executor.use(used)
            assert all(self.blocks[place].arrives <= self.now for place in used if self.blocks[place].state == "there")
            assert all(self.blocks[place].state == "there" for place in used)
            self.stalled += self.now - before
            self.tier.give("others", held)
            self.tier.take("others", held := size)
            self.now += seconds
            self.check()
        self.in_use = frozenset()
        self.tier.give("others", held)
        executor.end()
        assert all(block.state == "none" for block in self.blocks)
        return self.now - began

    def check(self) -> None:
        """The ledger says what is there, and that is not too much but while it measures."""
        here = sum(block.nbytes_whole for block in self.blocks if block.state != "none")
        assert self.tier.held.get(MOVING, 0) == here
        assert self.tier.capacity is None or self.tier.measures or self.tier.used <= self.tier.capacity


class Block:
    """What an executor moves."""

    def __init__(self, machine: Machine, place: int, size: int) -> None:
        self._machine, self._place, self.nbytes_whole = machine, place, size
        self.state, self.arrives = "none", 0

    def _do(self, action: str) -> None:
        assert (self.state, action) in LEGAL, f"{action} of a block with {self.state}"
        self.state = LEGAL[self.state, action]

    def settle(self) -> None:
        """Nobody updates it."""

    def open(self) -> None:
        self._do("open")
        self._machine.check()

    def fill(self) -> None:
        self._do("fill")
        machine = self._machine
        self.arrives = machine.free_at = max(machine.free_at, machine.now) + self.nbytes_whole
        machine.copied += self.nbytes_whole

    def let_go(self) -> None:
        self._do("let_go")
        assert self._place not in self._machine.in_use, "it is in use"
        assert self.arrives <= self._machine.now, "the link writes to it"


class Arrival:
    """A ticket."""

    def __init__(self, machine: Machine, time: int) -> None:
        self._machine, self._time = machine, time

    def wait(self, cause: str = "") -> None:
        self._machine.now = max(self._machine.now, self._time)
