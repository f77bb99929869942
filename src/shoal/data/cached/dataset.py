"""A map-style dataset that computes each sample once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ...errors import UserError
from ..cache import default_cache_dir, fingerprint_of
from ..loader import MapDataset
from .local import LocalStore
from .record import pack, unpack
from .remote import RedisStore

FORMAT = 1
CAPACITY_BYTES = 32 << 30


class Store(Protocol):
    """Payloads by sample index, shared by processes. What it does not have, or not whole, is None."""

    def get(self, index: int) -> bytes | None: ...
    def put(self, index: int, payload: bytes) -> None: ...


class CachedDataset:
    """`dataset` with `dataset[i]` computed once, by whichever process asks first, and then read from a store.

    Samples are dicts of tensors, arrays, numbers, strings and None, and come back as they were; every read is a copy of its own. Random
    augmentation belongs after the cache.

    `name` says what the samples are, such as "imagenet/resized-224": caches of another name or number of samples are apart, and nothing
    else tells that the dataset or its processing has changed. By default the store is a file of this host under `path` (default: the
    cache directory of the user), of at most `capacity_bytes` (default: 32 GiB); see LocalStore. With `url`, one or several of Redis
    servers, it is those, and their own limits hold; see RedisStore.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        name: str,
        path: str | Path | None = None,
        url: str | Sequence[str] | None = None,
        capacity_bytes: int | None = None,
    ) -> None:
        if not name:
            raise UserError('name is empty: say what the samples are, e.g. name="imagenet/resized-224"')
        self._dataset, self._samples = dataset, len(dataset)
        identity = fingerprint_of("samples", FORMAT, name, self._samples)
        self._store: Store
        if url:
            if path is not None or capacity_bytes is not None:
                raise UserError(
                    "url was given with path or capacity_bytes, which are of the local file: leave them out, and set the "
                    "servers' capacity by their maxmemory and maxmemory-policy"
                )
            self._store = RedisStore([url] if isinstance(url, str) else list(url), f"shoal:{identity}")
        else:
            directory = Path(path) if path is not None else default_cache_dir() / "samples"
            self._store = LocalStore(
                directory / identity, self._samples, CAPACITY_BYTES if capacity_bytes is None else capacity_bytes
            )

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples}")
        payload = self._store.get(index)
        sample = None if payload is None else unpack(payload)
        if sample is None:  # not there, or not one that `pack` wrote
            payload = pack(self._dataset[index])
            self._store.put(index, payload)
            sample = unpack(payload)
            assert sample is not None
        return sample
