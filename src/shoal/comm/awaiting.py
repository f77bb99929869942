"""A store in whose waits a rank notices that those who were to come cannot."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from shoal.comm.wrapped import WrappedStore

PATIENCE = timedelta(minutes=5)
"""How long a value is waited for where nothing else is said, as by torch's stores."""
LOOK_SECONDS = 0.5
"""Between looks at the ranks that are waited for."""


class AwaitingStore(WrappedStore):
    """The store `bare`. While a value is waited for, `check` is called now and then, and ends the wait by
    raising."""

    def __init__(self, bare: dist.Store, check: Callable[[], None]) -> None:
        super().__init__(bare)
        self._check = check

    def get(self, key: str) -> bytes:
        self.wait([key])
        return super().get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (timeout or PATIENCE).total_seconds()
        while True:
            left = max(0.001, deadline - time.monotonic())
            try:
                super().wait(keys, timedelta(seconds=min(LOOK_SECONDS, left)))
                return
            except RuntimeError as error:
                if not isinstance(error, dist.DistStoreError) and "Wait timeout" not in str(error):  # a FileStore's
                    raise
                self._check()
                if time.monotonic() >= deadline:
                    raise

    def clone(self) -> AwaitingStore:
        return AwaitingStore(self._cloned(), self._check)
