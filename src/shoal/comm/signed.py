"""A store whose values are signed: what somebody wrote there who does not know the ranks' secret is never read.

Everyone who reaches a store may write to it, and torch's has no notion of users. So a value stands there behind an HMAC over the run's key,
the store's key (with its prefixes, and so the generation) and the value. Counters (`add`) and deletions are not signed: a stranger may
stop a run by them, but not tell it anything.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from datetime import timedelta

import torch.distributed as dist

from shoal.comm.secret import REMEDY, find_secret
from shoal.errors import LaunchError

_MAC_BYTES = 32


def derived(key: bytes, *parts: str | bytes) -> bytes:
    """HMAC-SHA256 by `key` of `parts`, with their lengths; the key of what they name, or the proof of knowing `key`."""
    said = [part.encode() if isinstance(part, str) else part for part in parts]
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in said), hashlib.sha256)


class SignedStore(dist.Store):
    """`bare` with values signed by `key`. LaunchError for a value that was not signed so.

    torch's C++ keeps no reference to it: whoever gives it to a PrefixStore holds it as long.
    """

    def __init__(self, bare: dist.Store, key: bytes) -> None:
        super().__init__()
        self.bare, self.key = bare, key

    def set(self, key: str, value: str | bytes) -> None:  # which C++ hands over
        data = value.encode() if isinstance(value, str) else value
        self.bare.set(key, derived(self.key, key, data) + data)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        found = self.bare.get(key)
        proof, data = found[:_MAC_BYTES], found[_MAC_BYTES:]
        if not hmac.compare_digest(proof, derived(self.key, key, data)):
            raise LaunchError(
                f"the value of {key!r} in the ranks' store was not written by a rank of this run: it is not signed with its secret. Another "
                f"user's process may have written it, or the ranks have different secrets; {REMEDY}"
            )
        return data

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
        """By the name that C++ looks for."""
        return self.bare.delete_key(key)

    def clone(self) -> SignedStore:
        return SignedStore(self.bare.clone(), self.key)  # type: ignore[attr-defined]  # the stub forgets it


def root_of(store: dist.Store) -> dist.Store:
    """What is below all its prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def signed(store: dist.Store) -> dist.Store:
    """`store`, signed by this user's secret unless it is signed already or belongs to one process.

    Unlike `meet`, it does not tell this run from an earlier one on the same store.
    """
    own = isinstance(root_of(store), SignedStore | dist.HashStore)
    return store if own else SignedStore(store, derived(find_secret(), "store"))


def key_of(store: dist.Store) -> bytes:
    """The key by which the values of `store` are signed, or would be."""
    root = root_of(store)
    return root.key if isinstance(root, SignedStore) else derived(find_secret(), "store")


def meet(bare: dist.Store, rank: int, size: int, secret: bytes, timeout: timedelta) -> SignedStore:
    """The ranks' store, signed by a key of this run alone, so that nothing of an earlier one passes; all ranks call it, once a store.

    Each rank says something that it never said before, rank 0 signs all of it, and each finds its own in what the key is derived from.
    Raises LaunchError, on all ranks, where one of them does not know the secret.
    """
    first = SignedStore(bare, derived(secret, "meeting"))
    mine = secrets.token_hex(16)
    first.set(f"fresh/{rank}", mine)
    if rank == 0:
        try:
            first.wait([f"fresh/{other}" for other in range(size)], timeout)
            said, why = [first.get(f"fresh/{other}").decode() for other in range(size)], ""
        except LaunchError as error:
            said, why = [], str(error)
        first.set("session", json.dumps([said, why]))
    first.wait(["session"], timeout)
    said, why = json.loads(first.get("session"))
    if why:
        raise LaunchError(why)
    if len(said) != size or said[rank] != mine:
        raise LaunchError(f"rank {rank}: the ranks' store repeats what an earlier run has said there; start anew, with another port or file")
    return SignedStore(bare, derived(secret, "run", *said))
