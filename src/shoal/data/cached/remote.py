"""Records on Redis servers, shared by several hosts."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

from ...errors import UserError
from ..keyed import derive_key
from .record import opened, seal

RETRY_SECONDS = 30.0
"""How long a server that failed is not called again, since each call to it may wait for a time-out."""


class RedisStore:
    """Records under keys `<prefix>:<index>` on Redis servers, each key on one of them.

    urls: addresses of the servers (redis://, rediss:// or unix://).
    prefix: of the keys.
    timeout: seconds to wait for an answer.

    Capacity and eviction are the servers' own `maxmemory` and `maxmemory-policy`. A key's server is the one with the
    highest hash of (url, key) (rendezvous hashing), so that adding a server moves only its share of the keys.

    Raises UserError where a server cannot be reached at first: the URL is wrong or nobody started it. A server that is
    lost later, or is full, costs only speed: its samples are computed, with one warning, and it is tried again after
    RETRY_SECONDS.
    """

    def __init__(self, urls: Sequence[str], prefix: str, timeout: float = 5.0) -> None:
        self._arguments = (urls, prefix, timeout)
        self._urls, self._prefix = tuple(urls), prefix
        self._clients = {url: _client(url, timeout) for url in self._urls}
        self._not_before = dict.fromkeys(self._urls, 0.0)
        self._warned: set[str] = set()

    def __reduce__(self) -> tuple:
        return RedisStore, self._arguments

    def get(self, index: int) -> bytes | None:
        """Returns the payload of sample `index`, or None if there is none or its server is lost."""
        record = self._call(index, "get")
        return None if record is None else opened(index, record)

    def put(self, index: int, payload: bytes) -> None:
        """Stores the payload of sample `index`, if its server accepts it."""
        self._call(index, "set", seal(index, payload))

    def _call(self, index: int, command: str, *arguments: bytes) -> Any:
        from redis.exceptions import OutOfMemoryError, RedisError

        key = f"{self._prefix}:{index}"
        url = max(self._urls, key=lambda url: derive_key(url, key))
        if time.monotonic() < self._not_before[url]:
            return None
        try:
            return getattr(self._clients[url], command)(key, *arguments)
        except RedisError as error:
            if not isinstance(error, OutOfMemoryError):
                self._not_before[url] = time.monotonic() + RETRY_SECONDS
            if url not in self._warned:
                self._warned.add(url)
                warnings.warn(
                    f"{_describe(url)} failed: {str(error).rstrip('.')}. Its samples are computed while it does",
                    stacklevel=5,
                )
            return None


def _client(url: str, timeout: float) -> Any:
    """Connects to a server. The client's pool opens new connections in a forked process."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise UserError(
            "a cache by URL needs the Redis client: pip install 'shoal[redis]', or give path instead of url"
        ) from error
    try:
        # One retry: an idle connection may have been closed by the server.
        client = redis.Redis.from_url(
            url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 1)
        )
        client.ping()
    except (redis.RedisError, ValueError) as error:
        raise UserError(
            f"{_describe(url)} cannot be used: {str(error).rstrip('.')}. Start it, or correct url, e.g. "
            "redis://127.0.0.1:6379/0"
        ) from error
    return client


def _describe(url: str) -> str:
    """Names the server without its password."""
    return f"the Redis server {url.rpartition('@')[2].removeprefix('redis://')}"
