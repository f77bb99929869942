"""Dims of tensors as products of atoms, so that it is known which dims of which tensors are the same thing.

An atom is a range of indices that can be cut among ranks. A dim of 32 that is later viewed as 4 heads of 8 is refined
into the product of two atoms; queries, keys and values in one dim of 96 become a product (3, 32) where they are split
evenly, and a sum of atoms where not. Dims that an elementwise operation joins are the same atoms from then on, for all
tensors that have them: so the rows of one layer and the columns of the next become one atom. An operation that needs a
whole dim (a norm, a softmax, a sum) blocks its atoms.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from shoal.parallel.tensor.spans import even


class Atom:
    """A range of `size` indices.

    factors: what it is a product of, outer first; None while it is not refined
    parts: the dims of which it is the sum, one behind the other; None if it is no sum
    blocked: why it cannot be cut, as the name of an operation; "" if it can
    """

    def __init__(self, size: int, parts: list[Dim] | None = None) -> None:
        self.size, self.parts = size, parts
        self.factors: list[Atom] | None = None
        self.blocked = ""

    def refine(self, factors: list[Atom]) -> None:
        """Makes it the product of `factors`, which take over that it is blocked."""
        self.factors = factors
        if self.blocked:
            block(factors, self.blocked)


Dim = list[Atom]
"""A product of atoms, outer first; empty for a dim of size 1."""


def new(size: int) -> Dim:
    """Returns a dim of an atom of its own."""
    return [Atom(size)] if size != 1 else []


def resolve(dim: Sequence[Atom]) -> Dim:
    """Returns the dim in atoms that are not refined (sums are kept as they are)."""
    found: Dim = []
    for atom in dim:
        if atom.factors is None:
            found.append(atom)
        else:
            found += resolve(atom.factors)
    return found


def leaves(dim: Sequence[Atom]) -> Iterator[Atom]:
    """Yields all atoms of a dim that are neither refined nor sums."""
    for atom in resolve(dim):
        if atom.parts is None:
            yield atom
        else:
            for part in atom.parts:
                yield from leaves(part)


def size(dim: Sequence[Atom]) -> int:
    return prod(atom.size for atom in dim)


def block(dim: Sequence[Atom], why: str) -> None:
    """Notes that no atom of the dim can be cut."""
    for atom in resolve(dim):
        atom.blocked = atom.blocked or why
        for part in atom.parts or ():
            block(part, why)


def unify(a: Sequence[Atom], b: Sequence[Atom], why: str) -> None:
    """Makes two dims the same; blocks both if they are cut into atoms that do not match, or are not of one size: an
    operation that its kind does not describe."""
    left, right = resolve(a), resolve(b)
    if size(left) != size(right):
        block([*left, *right], why)
        return
    while left and right:
        x, y = left.pop(), right.pop()
        if x is y:
            continue
        if x.size == y.size:
            _alias(x, y, why)
        else:
            big, small = (x, y) if x.size > y.size else (y, x)
            if big.parts is not None or big.size % small.size:
                block([x, y, *left, *right], why)
                return
            outer = Atom(big.size // small.size)
            big.refine([outer, small])
            (left if big is x else right).append(outer)
    assert not left and not right, "dims of one size"


def _alias(x: Atom, y: Atom, why: str) -> None:
    if x.parts is None:
        x.refine([y])
    elif y.parts is None:
        y.refine([x])
    elif [size(part) for part in x.parts] == [size(part) for part in y.parts]:
        pairs = list(zip(x.parts, y.parts, strict=True))
        x.refine([y])
        for one, other in pairs:
            unify(one, other, why)
    else:
        block([x, y], why)


def reshape(dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim] | None:
    """Returns the dims of a tensor with `dims` that is viewed as `shape`; None if its atoms do not match the shape."""
    atoms = [atom for dim in dims for atom in resolve(dim)]
    found: list[Dim] = []
    for wanted in reversed(shape):
        dim: Dim = []
        while wanted > 1:
            if not atoms:
                return None
            atom = atoms.pop()
            if wanted % atom.size == 0:
                dim.insert(0, atom)
                wanted //= atom.size
            elif atom.size % wanted == 0 and atom.parts is None:
                outer, inner = Atom(atom.size // wanted), Atom(wanted)
                atom.refine([outer, inner])
                dim.insert(0, inner)
                atoms.append(outer)
                wanted = 1
            else:
                return None
        found.insert(0, dim)
    return found if not atoms else None


def pieces(dim: Dim, sizes: Sequence[int], why: str) -> list[Dim]:
    """Returns the dims of the pieces, of `sizes`, into which a dim is split; the pieces are all of it."""
    if len(sizes) == 1:
        return [dim]
    if len(set(sizes)) == 1 and not _is_sum(dim):
        halves = reshape([dim], [len(sizes), sizes[0]])
        if halves is not None:
            block(halves[0], why)
            return [halves[1]] * len(sizes)
    found, start = [], 0
    for length in sizes:
        found.append(stretch(dim, start, start + length, why))
        start += length
    return found


def stretch(dim: Dim, start: int, stop: int, why: str) -> Dim:
    """Returns the dim of the indices [start, stop) of a dim, which becomes a sum."""
    whole = size(dim)
    if (start, stop) == (0, whole):
        return dim
    atoms = resolve(dim)
    if len(atoms) != 1:
        block(dim, why)
        return new(stop - start)
    atom = atoms[0]
    if atom.parts is None:
        bounds = sorted({0, start, stop, whole})
        parts = [new(end - begin) for begin, end in itertools.pairwise(bounds)]
        atom.refine([Atom(whole, parts)])
        return parts[bounds.index(start)]
    found, at = [], 0
    for part in atom.parts:
        first, last = max(start, at), min(stop, at + size(part))
        if first < last:
            found.append(stretch(part, first - at, last - at, why))
        at += size(part)
    return found[0] if len(found) == 1 else [Atom(stop - start, found)]


def joined(parts: Sequence[Dim]) -> Dim:
    """Returns the dim of tensors that are concatenated along dims `parts`."""
    return list(parts[0]) if len(parts) == 1 else [Atom(sum(map(size, parts)), [list(part) for part in parts])]


def _is_sum(dim: Dim) -> bool:
    return any(atom.parts is not None for atom in resolve(dim))


def mask(dim: Sequence[Atom], cut: frozenset[Atom], ranks: int, rank: int) -> NDArray[np.bool_]:
    """Returns which indices of the dim a rank has, where the atoms in `cut` are cut among `ranks`."""
    here = np.ones(1, dtype=np.bool_)
    for atom in resolve(dim):
        if atom.parts is not None:
            own = np.concatenate([mask(part, cut, ranks, rank) for part in atom.parts])
        else:
            own = np.ones(atom.size, dtype=np.bool_)
            if atom in cut:
                span = even(atom.size, ranks, rank)
                own[:] = False
                own[span.start : span.stop] = True
        here = (here[:, None] & own[None, :]).reshape(-1)
    return here


def stretches(here: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Returns the stretches [start, stop) of the indices that are set."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], here, [False]]).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
