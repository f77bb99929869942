"""A store whose values are signed, so that values from somebody who does not know the ranks' secret are never used.

Everyone who reaches a store can write to it, and torch's has no notion of users. Each value is therefore preceded by an
HMAC over the run's key, the store's key (with its prefixes, and so the generation) and the value. Counters (`add`) and
deletions are not signed: a stranger can stop a run by them, but not feed it values.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from datetime import timedelta

import torch.distributed as dist

from shoal.comm.awaiting import AwaitingStore
from shoal.comm.secret import REMEDY, find_secret
from shoal.comm.wrapped import WrappedStore
from shoal.errors import LaunchError

_MAC_BYTES = 32


def derived(key: bytes, *parts: str | bytes) -> bytes:
    """Returns the HMAC-SHA256 by `key` of `parts` and their lengths: a derived key, or a proof of knowing `key`."""
    said = [part.encode() if isinstance(part, str) else part for part in parts]
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in said), hashlib.sha256)


class SignedStore(WrappedStore):
    """The store `bare` with values signed by `key`. Raises LaunchError for a value with a wrong signature."""

    def __init__(self, bare: dist.Store, key: bytes) -> None:
        super().__init__(bare)
        self.key = key

    def set(self, key: str, value: str | bytes) -> None:  # C++ passes bytes
        data = value.encode() if isinstance(value, str) else value
        super().set(key, derived(self.key, key, data) + data)

    def get(self, key: str) -> bytes:
        found = super().get(key)
        proof, data = found[:_MAC_BYTES], found[_MAC_BYTES:]
        if not hmac.compare_digest(proof, derived(self.key, key, data)):
            raise LaunchError(
                f"the value of {key!r} in the ranks' store was not written by a rank of this run: it is not signed "
                "with its secret. Another user's process may have written it, or the ranks have different secrets; "
                f"{REMEDY}"
            )
        return data

    def clone(self) -> SignedStore:
        return SignedStore(self._cloned(), self.key)


def root_of(store: dist.Store) -> dist.Store:
    """Returns the store below all that only adds prefixes or looks at ranks."""
    while isinstance(store, dist.PrefixStore | AwaitingStore):
        store = store.bare if isinstance(store, AwaitingStore) else store.underlying_store
    return store


def signed(store: dist.Store) -> dist.Store:
    """Returns `store` signed by this user's secret, or as it is if it is signed already or belongs to one process.

    Unlike `meet`, it does not tell this run from an earlier one on the same store.
    """
    own = isinstance(root_of(store), SignedStore | dist.HashStore)
    return store if own else SignedStore(store, derived(find_secret(), "store"))


def key_of(store: dist.Store) -> bytes:
    """Returns the key that signs the values of `store`, or would sign them."""
    root = root_of(store)
    return root.key if isinstance(root, SignedStore) else derived(find_secret(), "store")


def meet(bare: dist.Store, rank: int, size: int, secret: bytes, timeout: timedelta) -> SignedStore:
    """Returns the ranks' store, signed by a key of this run alone, so that values of earlier runs are refused.

    All ranks call it, once for each store. Each rank writes a fresh random number, rank 0 signs the list of them, each
    rank checks that its own is in it, and the key is derived from the list. Raises LaunchError, on all ranks, where one
    of them does not know the secret.
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
        raise LaunchError(
            f"rank {rank}: the ranks' store repeats what an earlier run has said there; "
            "start anew, with another port or file"
        )
    return SignedStore(bare, derived(secret, "run", *said))
