"""Search of the chunk size that wastes least memory, where weights are gathered. Pure functions: all ranks agree.

Chunks cost padding: slots begin on 64 bytes, the cut among ranks is even, whole parameters that are dealt to ranks
leave them uneven. And the largest chunk sets what must be in memory at a time: the weights in use and those on their
way, two gradients on loan, and masters and state in turn where updates pass through the device. Small chunks cost the
one, large ones the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.chunks.assign import Described, assign, lay_out

SMALLEST, LARGEST = 2**20, 2**28
"""Bytes of gradient. Smaller chunks cost more calls than they save memory: they are taken only if a budget needs
them."""
TINIEST = 2**12
AT_A_TIME = 2
"""Chunks in use: one that is computed with, one on its way."""
SHARE = 0.5
"""Share of the device's budget for weights in use and gradients on loan; the rest is for activations, not known yet."""


@dataclass(frozen=True)
class Candidate:
    """Chunks of about `chunk_bytes` of gradient, and what they cost in bytes.

    - `chunks`: their number
    - `weights`: of all chunks, padding included
    - `padding`: of weights that belong to no parameter
    - `in_use`: weights, gradients and what is updated in turn in memory at a time, at most
    """

    chunk_bytes: int
    chunks: int
    weights: int
    padding: int
    in_use: int

    @property
    def waste(self) -> float:
        """Share of the weights that is padding."""
        return self.padding / max(1, self.weights)

    @property
    def cost(self) -> int:
        """Bytes to be minimised."""
        return self.padding + self.in_use


@dataclass(frozen=True)
class Choice:
    """Result of a search: `candidates`, ordered by size, and the `best` of them."""

    best: Candidate
    candidates: tuple[Candidate, ...]


def search(
    parameters: Sequence[Described],
    ranks: int,
    grad_itemsize: int,
    whole_parameters: bool = False,
    budget: int | None = None,
    in_turn: int = 0,
) -> Choice:
    """Finds the chunk size of least cost for `parameters` (see `assign`), cut among `ranks`; of equal ones the largest.

    `in_turn`: bytes of the device for each element that a rank owns of the largest chunk, where updates pass through.
    `budget`: bytes of the device. What is in use may take SHARE of it; if that is too little for all sizes, the one
    that takes least is chosen.
    """
    candidates = tuple(
        candidate(parameters, ranks, grad_itemsize, whole_parameters, size, in_turn)
        for size in sizes(parameters, grad_itemsize)
    )
    fit = [each for each in candidates if budget is None or each.in_use <= SHARE * budget]
    usual = [each for each in fit if each.chunk_bytes >= SMALLEST]
    if usual or fit:
        return Choice(min(usual or fit, key=lambda each: (each.cost, -each.chunk_bytes)), candidates)
    return Choice(min(candidates, key=lambda each: (each.in_use, each.cost, -each.chunk_bytes)), candidates)


def sizes(parameters: Sequence[Described], grad_itemsize: int) -> list[int]:
    """Powers of two and one and a half times them, from an eighth of the largest parameter, or SMALLEST, until one
    chunk holds all, or LARGEST."""
    elements = [shape.numel() for _, shape, _ in parameters]
    low = min(SMALLEST, max(TINIEST, max(elements, default=0) * grad_itemsize // 8))
    high = max(SMALLEST, sum(elements) * grad_itemsize)
    grid = (base * half // 2 for base in (2**power for power in range(LARGEST.bit_length())) for half in (2, 3))
    found = [size for size in grid if low <= size <= LARGEST]
    return [size for index, size in enumerate(found) if index == 0 or found[index - 1] < high]


def candidate(
    parameters: Sequence[Described],
    ranks: int,
    grad_itemsize: int,
    whole_parameters: bool,
    chunk_bytes: int,
    in_turn: int = 0,
) -> Candidate:
    """Counts what chunks of about `chunk_bytes` of gradient cost."""
    weights = padding = weight = gradient = pages = 0
    cut = assign(parameters, chunk_bytes, grad_itemsize)
    for key, slots in cut:
        _, size = lay_out(slots, ranks, min(key.dtype.itemsize, grad_itemsize), whole_parameters)
        weights += size * key.dtype.itemsize
        padding += (size - sum(slot.numel for slot in slots)) * key.dtype.itemsize
        weight = max(weight, size * key.dtype.itemsize)
        gradient = max(gradient, size * grad_itemsize * key.trainable)
        pages = max(pages, size // ranks * in_turn * key.trainable)
    return Candidate(chunk_bytes, len(cut), weights, padding, AT_A_TIME * (weight + gradient) + pages)
