"""Which choices have room, and by which seconds they are ranked."""

from __future__ import annotations

import math
from functools import cached_property

from shoal.planner.choices import Choices
from shoal.planner.costs import COMPILING
from shoal.planner.estimates import Begun
from shoal.planner.held import Held
from shoal.planner.task import Choice, Estimate

SURE = 0.05
"""The share of a step that compiling blocks has to spare: predictions are off by about as much."""


class Judged(Choices):
    """The choices of a task, and how good each is."""

    def fits(self, choice: Choice, has: Held) -> bool:
        """Whether the fullest rank has room for what it holds, on its device and on its host, which may be one."""
        return self.lacks(choice, has) <= 0

    def lacks(self, choice: Choice, has: Held) -> float:
        """Bytes for which it has no room, of its device or of its host; 0 or less where it has."""
        host = has.host - self.on_host(choice)
        if self.prices.slowest.on_host:
            return max(host, has.bytes + has.host - self.task.most)
        return max(host, has.bytes - self.most(choice))

    def on_host(self, choice: Choice) -> float:
        """Bytes of the host that a rank may use, by the machine and the plan; of cores the machine has one memory."""
        given = None if choice.offload is None else choice.offload.host
        has = math.inf if self.prices.slowest.on_host else self.task.cluster.host_memory
        return has if given is None else min(has, given)

    def _fits_somehow(self, begun: Begun) -> bool:
        """Whether a choice fits, if need be with more of it on the device, where the host has not room for it."""
        choice, has = begun.choice, begun.fullest
        if has.bytes > self.most(choice):
            return False
        if self.fits(choice, has):
            return True
        may = has.host - self.most(choice) <= self.on_host(choice)
        return may and self.fits(choice, self.freest(begun).fullest)

    def _as_on_host(self, choice: Choice) -> Choice:
        """The choice whose host has room for what goes to a disk: it takes as much of the device, and computes the
        same in the same time."""
        if choice.offload is None or choice.offload.disk is None or self.prices.slowest.on_host:
            return choice
        return choice._replace(offload=self.nearer[choice.offload][-1])

    def _at_ease(self, begun: Begun) -> bool:
        """Whether nothing is computed again but what a pin says."""
        return "recompute" in self.task.pins or self._option(begun.lane, begun.counts) == "none"

    def rank(self, estimate: Estimate) -> float:
        """Seconds of a step by which candidates are ranked: with compiled blocks they have to be `SURE` to be fewer,
        and a step has its share of what compiling takes before the first one."""
        return self._ranked(estimate.choice, estimate.seconds)

    def _ranked(self, choice: Choice, seconds: float) -> float:
        if not choice.compile or "compile" in self.task.pins:
            return seconds
        return (1 + SURE) * seconds + COMPILING * self._kinds / (self.task.steps or math.inf)

    @cached_property
    def _kinds(self) -> int:
        """Kinds of blocks, each of which is compiled."""
        return len({part.kind for part in self.task.profile.parts if part.is_block})
