"""Exchanges messages between ranks during one save, through the store.

It uses no collectives: the save runs in a background thread, where they would have to be ordered with those of
training.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from torch.distributed import Store

from shoal.comm import wire
from shoal.errors import CheckpointError

POLL_SECONDS = 0.02


class World(Protocol):
    """The ranks, as far as a checkpoint needs them. `store` is shared by all ranks; it may be None for one rank."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def store(self) -> Store | None: ...


class Meeting:
    """Values put by one rank and got by others, under keys with a `prefix` that no other meeting of this store has."""

    def __init__(self, store: Store, prefix: str, rank: int, size: int) -> None:
        self.store, self.prefix, self.rank, self.size = store, prefix, rank, size
        self.given_up = False
        """Set by another thread: nobody is waited for any more."""

    def put(self, topic: str, value: Any) -> None:
        """Publishes `value`, of a type that `wire` can pack, under `topic`; once per topic."""
        self.store.set(self._key(topic), wire.pack(value))  # type: ignore[arg-type]  # the stub forgets bytes

    def get(self, topic: str, timeout: float) -> Any:
        """Waits for the value of `topic`. Raises TimeoutError after `timeout` seconds, and CheckpointError once it is
        given up."""
        key, deadline = self._key(topic), time.monotonic() + timeout
        # Polling: a blocking get would hold the lock of the store's client, and with it the training thread.
        while not self.store.check([key]):
            if self.given_up:
                raise CheckpointError("a rank is gone")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {topic!r} from another rank within {timeout:.0f} s")
            time.sleep(POLL_SECONDS)
        return wire.unpack(self.store.get(key))

    def leave(self, topics: list[str]) -> None:
        """Declares that this rank needs nothing more; the last one to leave deletes `topics`."""
        if self.store.add(self._key("left"), 1) == self.size:
            for topic in [*topics, "left"]:
                self.store.delete_key(self._key(topic))

    def _key(self, topic: str) -> str:
        return f"{self.prefix}/{topic}"
