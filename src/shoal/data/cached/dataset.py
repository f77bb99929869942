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
    """Payloads by sample index, shared by processes. `get` returns None for a missing or damaged payload."""

    def get(self, index: int) -> bytes | None: ...
    def put(self, index: int, payload: bytes) -> None: ...


class CachedDataset:
    """A map-style dataset that computes `dataset[i]` once, in whichever process asks first, then reads it from a store.

    Samples are dicts of tensors, arrays, numbers, strings and None; every read returns a copy. Random augmentation
    belongs after the cache.

    dataset: the dataset to cache.
    name: identifies the samples, such as "imagenet/resized-224". Another name or number of samples is another cache;
        nothing else detects that the dataset or its processing has changed.
    path: directory of the store, a file of this host (see LocalStore); by default the user's cache directory.
    url: one or several Redis servers to use instead, with their own limits (see RedisStore).
    capacity_bytes: size of the file at most; by default 32 GiB.

    Raises UserError for contradictory arguments, and where the store cannot be opened.
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
                    "url was given with path or capacity_bytes, which are of the local file: leave them out, and set "
                    "the servers' capacity by their maxmemory and maxmemory-policy"
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
        if sample is None:  # missing, or not written by `pack`
            payload = pack(self._dataset[index])
            self._store.put(index, payload)
            sample = unpack(payload)
            assert sample is not None
        return sample
