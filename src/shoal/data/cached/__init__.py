"""Samples that are computed once and then read from a store: a file of this host, or Redis servers."""

from .dataset import CachedDataset
from .local import LocalStore
from .remote import RedisStore

__all__ = ["CachedDataset", "LocalStore", "RedisStore"]
