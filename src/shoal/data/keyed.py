"""Keyed hashing of integers: random numbers for data, without a state to save.

Every draw is a pure function of a key and an index, so any rank can make any draw in any order.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def derive_key(*parts: int | str) -> int:
    """Returns a 64-bit key made of `parts`, such as (purpose, seed, epoch); the same on every platform and run."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def keyed_hash(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Returns 64 well-mixed bits for each of `values` (an array of at least one dimension), different for each key.

    Uses the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    x = values + np.uint64(key)  # arrays of uint64 wrap silently, as the mixer needs
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
