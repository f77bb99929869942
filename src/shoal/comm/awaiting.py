"""A store in whose waits a rank notices that those who were to come cannot."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

PATIENCE = timedelta(minutes=5)
"""How long a value is waited for where nothing else is said, as by torch's stores."""
LOOK_SECONDS = 0.5
"""Between looks at the ranks that are waited for."""


class AwaitingStore(dist.Store):
    """Wraps `underlying_store`. While a value is waited for, `check` is called now and then, and ends the wait by
    raising.

    torch's C++ keeps no reference to it: whoever passes it to a PrefixStore must hold it as long.
    """

    def __init__(self, underlying_store: dist.Store, check: Callable[[], None]) -> None:
        super().__init__()
        self.underlying_store, self._check = underlying_store, check

    def set(self, key: str, value: str | bytes) -> None:
        self.underlying_store.set(key, value)  # type: ignore[arg-type]  # C++ passes bytes

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.underlying_store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self.underlying_store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.underlying_store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (timeout or PATIENCE).total_seconds()
        while True:
            left = max(0.001, deadline - time.monotonic())
            try:
                self.underlying_store.wait(keys, timedelta(seconds=min(LOOK_SECONDS, left)))
                return
            except dist.DistStoreError:
                self._check()
                if time.monotonic() >= deadline:
                    raise

    def deleteKey(self, key: str) -> bool:
        """Deletes a key, under the name that C++ calls."""
        return self.underlying_store.delete_key(key)

    def clone(self) -> AwaitingStore:
        return AwaitingStore(self.underlying_store.clone(), self._check)  # type: ignore[attr-defined]  # as in signed
