"""The size of chunks, from the measured speed of links. It changes when gradients travel, never what is computed.

All G bytes of gradients in chunks of c take G/c times the latency a of a message, and after the last gradient one chunk
is still to be sent, c/b at bandwidth b: a G/c + c/b is least at c = sqrt(a b G).
"""

from __future__ import annotations

import math

from shoal.comm import Link
from shoal.errors import UserError
from shoal.exchange.algorithm import USUAL_CHUNK, Algorithm

SMALLEST, LARGEST = 2**20, 2**26
OVERHEAD = 100e-6
"""Seconds that a chunk costs beside its message: hooks, the lane's turn, the optimizer's calls."""


def worth_measuring(algorithm: Algorithm, gradient_bytes: int, ranks: int) -> bool:
    """Returns whether there is anything to choose."""
    return ranks > 1 and algorithm.chunk_bytes is None and gradient_bytes > SMALLEST


def given_chunk_bytes(algorithm: Algorithm, of_memory: int | None) -> int | None:
    """Returns the chunk size fixed by `plan.memory.chunk` or by the exchange. Raises UserError if both fix it."""
    if of_memory is not None and algorithm.chunk_bytes is not None:
        raise UserError(
            f"plan.memory.chunk = {of_memory} and chunk_bytes = {algorithm.chunk_bytes} of plan.exchange both say how "
            "large a chunk is: give one"
        )
    return algorithm.chunk_bytes if of_memory is None else of_memory


def chunk_bytes(algorithm: Algorithm, gradient_bytes: int, link: Link | None) -> int:
    """Returns what the algorithm, or its user, fixes, else a power of two near the optimum for `link`."""
    if algorithm.chunk_bytes is not None:
        return algorithm.chunk_bytes
    if link is None:
        return USUAL_CHUNK
    return best_size(link.latency, link.bandwidth, gradient_bytes)


def best_size(latency: float, bandwidth: float, gradient_bytes: float) -> int:
    """Returns a power of two near the optimum for a link (seconds, bytes a second)."""
    best = math.sqrt((latency + OVERHEAD) * bandwidth * gradient_bytes)
    return 2 ** round(math.log2(min(max(best, SMALLEST), LARGEST)))
