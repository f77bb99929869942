"""How long a rank's own work takes: its time in steps without that in which it waits for others (comm/ledger.py)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.data import Batch
from shoal.engine import Engine

SKIPPED, WINDOW, OUTLIERS = 3, 8, 1
"""The first steps, which warm up; how many count at a time; how many of them, the dearest, are left out, since a block
may have been compiled in one for a short batch."""


class OwnPace:
    """The pace of this rank under the plan that `engine` has now.

    seconds: of its own work for a sample, the mean over the last steps; 0 before there are WINDOW of them. Time in
        which an accelerator computes is not seen from here: there all ranks have about the same.
    best: the least that `seconds` has been.
    part: see Mesh.part.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._skip = engine, SKIPPED
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self.seconds = self.best = 0.0
        self.part = engine.parts.mesh.part

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Measures a step on `batch`. One in which this rank has no sample does not count."""
        ledger = self._engine.ledger
        began, waited = time.perf_counter(), ledger.waited
        yield
        own = time.perf_counter() - began - (ledger.waited - waited)
        samples = sum(map(len, self._engine.parts.runner.dealing.cut(batch.ids).microbatches))
        if not samples:
            return
        self._skip -= self._skip > 0
        if not self._skip:
            self._recent.append(max(own, 1e-9) / samples)
        if len(self._recent) == WINDOW:
            usual = sorted(self._recent)[:-OUTLIERS]
            self.seconds = sum(usual) / len(usual)
            self.best = min(self.best or self.seconds, self.seconds)
