"""Exchanges messages between ranks during one save, through the store.

It uses no collectives: the save runs in a background thread, where they would have to be ordered with those of
training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from torch.distributed import Store

from shoal.comm import wire
from shoal.errors import CheckpointError, LaunchError

POLL_SECONDS, LOOK_SECONDS = 0.02, 0.5
"""Between two looks for a value; and for ranks that are gone."""


class World(Protocol):
    """The ranks, as far as a checkpoint needs them. `store` is shared by all ranks; it may be None for one rank. `lost`
    says which of them is gone, "" for none."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def store(self) -> Store | None: ...
    def lost(self) -> str: ...


class Meeting:
    """Values put by one rank and got by others, under keys with a `prefix` that no other meeting of this store has.
    `lost`: as of the World."""

    def __init__(self, store: Store, prefix: str, rank: int, size: int, lost: Callable[[], str]) -> None:
        self.store, self.prefix, self.rank, self.size, self._lost = store, prefix, rank, size, lost
        self.given_up = False
        """Set by another thread: nobody is waited for any more."""

    def put(self, topic: str, value: Any) -> None:
        """Publishes `value`, of a type that `wire` can pack, under `topic`; once per topic."""
        self.store.set(self._key(topic), wire.pack(value))  # type: ignore[arg-type]  # the stub forgets bytes

    def get(self, topic: str, timeout: float) -> Any:
        """Waits for the value of `topic`. Raises TimeoutError after `timeout` seconds, CheckpointError once it is given
        up, and LaunchError where a rank is gone."""
        key, began = self._key(topic), time.monotonic()
        deadline, look = began + timeout, began + LOOK_SECONDS
        # Polling: a blocking get would hold the lock of the store's client, and with it the training thread.
        while not self.store.check([key]):
            if self.given_up:
                raise CheckpointError("a rank is gone")
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(f"no {topic!r} from another rank within {timeout:.0f} s")
            if now > look:
                look = now + LOOK_SECONDS
                if (why := self._lost()) and not self.store.check([key]):  # it may have come, and all be over
                    raise LaunchError(f"rank {self.rank}: a save cannot be completed: {why}")
            time.sleep(POLL_SECONDS)
        return wire.unpack(self.store.get(key))

    def leave(self, topics: list[str]) -> None:
        """Declares that this rank needs nothing more; the last one to leave deletes `topics`."""
        if self.store.add(self._key("left"), 1) == self.size:
            for topic in [*topics, "left"]:
                self.store.delete_key(self._key(topic))

    def _key(self, topic: str) -> str:
        return f"{self.prefix}/{topic}"
