"""Names the ranks that did not come to a collective that failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch.distributed as dist

from shoal.comm.unanswered import ask

_SECONDS = 0.5  # once in the life of a group; a launcher waits little longer for the ranks that have lost one


class RollCall:
    """Asks once, after the first failure of a group, which of its ranks stopped at the same collective.

    - `store`: the group's store; without one nobody can be asked
    - `rank`: this rank in the group
    - `ranks`: the group's ranks in the world, for messages
    - `gone`: whether one of these is known to have ended, and is not waited for
    """

    def __init__(self, store: dist.Store | None, rank: int, ranks: Sequence[int], gone: Callable[[int], bool]) -> None:
        self._store, self._rank, self._ranks, self._gone = store, rank, ranks, gone

    def call(self, number: int) -> str:
        """Returns a sentence about who is missing at the collective of this number; "" where that cannot be known."""
        store, self._store = self._store, None
        if store is None:
            return ""
        missing = list[int]()
        if not ask(partial(self._look, store, number, missing), _SECONDS + 0.2):
            return "the ranks' store does not answer. "
        return f"not there: rank {', '.join(map(str, missing))}. " if missing else "every rank stopped here. "

    def _look(self, store: dist.Store, number: int, missing: list[int]) -> None:
        """Adds those to `missing` that do not come to the collective of this number."""
        deadline = time.monotonic() + _SECONDS
        with suppress(RuntimeError):
            store.set(f"stopped/{number}/{self._rank}", "1")
        for rank, name in enumerate(self._ranks):
            here = False
            with suppress(RuntimeError):  # a store whose server is gone answers nothing: that rank counts as missing
                while not (here := store.check([f"stopped/{number}/{rank}"])) and time.monotonic() < deadline:
                    if self._gone(name):
                        break
                    time.sleep(0.01)
            if not here:
                missing.append(name)
