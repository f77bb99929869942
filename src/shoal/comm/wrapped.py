"""A store around another one, which passes on what a subclass does not change."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


class WrappedStore(dist.Store):
    """Wraps `bare`.

    torch's C++ keeps no reference to it: whoever passes it to a PrefixStore must hold it as long.
    """

    def __init__(self, bare: dist.Store) -> None:
        super().__init__()
        self.bare = bare

    def set(self, key: str, value: str | bytes) -> None:  # C++ passes bytes
        self.bare.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self.bare.get(key)

    def add(self, key: str, amount: int) -> int:
        return self.bare.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.bare.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self.bare.wait(keys)
        else:
            self.bare.wait(keys, timeout)

    def deleteKey(self, key: str) -> bool:
        """Deletes a key, under the name that C++ calls."""
        return self.bare.delete_key(key)

    def _cloned(self) -> dist.Store:
        return self.bare.clone()  # type: ignore[attr-defined]  # the stub forgets it
