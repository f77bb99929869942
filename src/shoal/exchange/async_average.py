"""Asynchronous model averaging (Bagua): replicas train alone while their weights are averaged in the background.

In a round each replica, between two of its steps, takes a snapshot s and goes on; when all have, the mean is formed,
and each adds mean - s between two steps, so that what it learned meanwhile stays. Only its partners in the round wait
for a slow replica, and they train on; a replica waits for the end of a round only `bound` steps after its snapshot.

A round also carries whether some replica wants to stop; then none starts another round until it reaches the same point.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from shoal.device import record_use
from shoal.errors import LaunchError, UserError
from shoal.exchange.algorithm import Replica, TrainsAlone
from shoal.exchange.sends import Sends


@dataclass
class AsyncAverage(TrainsAlone):
    """Averages weights in background rounds.

    - `interval_ms`: milliseconds from the end of a round to the start of the next: on a slow link rounds are rarer, and
      there is always time without one
    - `warmup`: exact steps before the first round
    - `bound`: steps after its snapshot at which a replica waits for the round's end
    """

    of_whole_models = (
        "its rounds begin by the clock, and ranks that share weights would average them at different steps"
    )
    interval_ms: float = 500.0
    warmup: int = 0
    bound: int = 64

    def sends(self, ranks: int, itemsize: int, side: float) -> Sends:
        return Sends(beside=True)

    def __post_init__(self) -> None:
        if self.interval_ms < 0 or self.warmup < 0 or self.bound < 1:
            raise UserError(
                f"plan.exchange: interval_ms = {self.interval_ms}, warmup = {self.warmup}, bound = {self.bound}: "
                "give at least 0, 0 and 1"
            )

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        self._group = replica.background("async")
        self._device = replica.chunks[0].master.device
        self._lane = replica.lane.another()
        self._snapshots = [torch.empty_like(chunk.master) for chunk in replica.chunks]
        self._means = [torch.empty_like(chunk.master) for chunk in replica.chunks]
        self._stops = torch.zeros(1, device=self._device)
        self._came = threading.Event()
        self._started: int | None = None  # the step before which this round's snapshot was taken
        self._stopped = False
        self._next = 0.0

    @property
    def alone_from(self) -> int:
        return self.warmup

    def begin(self, step: int) -> None:
        if step < self.warmup or self._group.size == 1:
            return
        if self._started is not None and (self._came.is_set() or step - self._started >= self.bound):
            self._take_in()
        if self._started is None and not self._stopped and time.monotonic() >= self._next:
            self._start(step, stop=False)

    def settle(self) -> None:
        """Ends the round under way, or starts the one that tells the others that this replica stops.

        It starts one even if this replica never began a round, since the others may have.
        """
        if self._group.size == 1:
            return
        while not self._stopped:
            if self._started is None:
                self._start(0, stop=True)
            self._take_in()
        self._stopped, self._next = False, 0.0

    def close(self) -> None:
        self._lane.close()

    def _start(self, step: int, stop: bool) -> None:
        self._started = step
        with torch.no_grad():
            torch._foreach_copy_(self._snapshots, [chunk.master for chunk in self.replica.chunks])
            self._stops.fill_(float(stop))
        self._came.clear()
        self._lane.submit(self._round, "round")

    @torch.no_grad()
    def _round(self) -> None:
        record_use(*self._snapshots, *self._means, self._stops)  # they may be given up meanwhile
        try:
            self._group.all_reduce(self._stops, "max", purpose="stop?")
            torch._foreach_copy_(self._means, self._snapshots)
            for chunk, mean in zip(self.replica.chunks, self._means, strict=True):
                self._group.all_reduce(mean, "avg", purpose=f"weights {chunk.index}")
        finally:
            self._next = time.monotonic() + self.interval_ms / 1000
            self._came.set()

    @torch.no_grad()
    def _take_in(self) -> None:
        try:
            self._lane.wait()
        except LaunchError as error:
            raise LaunchError(
                f"{error}\nThis replica waited for the end of a round of async_average, {self.bound} steps after its "
                "snapshot at the latest (bound), or in settle(). A replica that has made its last step joins no round: "
                "if it is in a collective of your program, such as a barrier, call engine.settle() on all ranks after "
                "their last step, before that collective"
            ) from error
        for chunk, mean, snapshot in zip(self.replica.chunks, self._means, self._snapshots, strict=True):
            chunk.master.add_(mean.sub_(snapshot))
            chunk.publish()
        self._started = None
        self._stopped = bool(self._stops > 0)
