"""Masks that vanish in a sum: what a server adds up without seeing any part of it (secure aggregation,
https://eprint.iacr.org/2017/281).

Numbers are whole multiples of 2**-24, added modulo 2**64. Each client adds a mask of its own, and for each pair of
clients one adds and the other subtracts the same mask; masks are SHAKE-256 of a seed of 32 bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

BITS = 24
"""Binary digits after the point."""
MOST = 2.0 ** (62 - BITS)
"""The largest absolute value of a sum: half of what the words can tell apart."""

Words = NDArray[np.uint64]


def to_words(values: NDArray[np.float64], clients: int) -> Words:
    """Rounds numbers to multiples of 2**-BITS. Raises ValueError for numbers that are not finite, or so large that the
    sum of those of `clients` clients could overflow."""
    most = MOST / clients
    if not np.isfinite(values).all() or np.abs(values).max(initial=0.0) > most:
        raise ValueError(
            f"a number that is not finite, or above {most:g}, would spoil the sum of {clients} clients: a lower "
            "learning rate is the remedy"
        )
    return np.rint(values * 2.0**BITS).astype(np.int64).view(np.uint64)


def from_words(words: Words) -> NDArray[np.float64]:
    """Returns the numbers that words, or a sum of them, stand for."""
    return words.view(np.int64).astype(np.float64) / 2.0**BITS


def mask(seed: bytes, size: int) -> Words:
    """Returns the mask of a seed."""
    return np.frombuffer(hashlib.shake_256(seed).digest(8 * size), "<u8").astype(np.uint64)


def masked(words: Words, own: bytes, client: int, pairs: Mapping[int, bytes]) -> Words:
    """Adds a client's masks: of its `own` seed, and of the seed that it shares with each other client in `pairs`."""
    found = words + mask(own, len(words))
    for other, seed in pairs.items():
        found = found + mask(seed, len(words)) if client < other else found - mask(seed, len(words))
    return found


def unmasked(total: Words, own: Mapping[int, bytes], left_over: Mapping[tuple[int, int], bytes]) -> Words:
    """Takes masks off a sum: the own ones of the clients in it, and those that pairs (a client in it, one that is not)
    share."""
    for seed in own.values():
        total = total - mask(seed, len(total))
    for (there, gone), seed in left_over.items():
        total = total - mask(seed, len(total)) if there < gone else total + mask(seed, len(total))
    return total
