"""The split into training and validation documents, by a keyed hash of the document's number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError
from .keyed import derive_key, keyed_hash


@dataclass(frozen=True)
class Split:
    """Ascending document numbers of each side. `validation` is empty only where nothing is to be held out."""

    train: NDArray[np.int64]
    validation: NDArray[np.int64]


def split_documents(documents: int, validation: float, seed: int) -> Split:
    """Splits range(documents): each document independently goes to validation with probability `validation`.

    So appending documents does not move earlier ones. A side that would be empty gets the one document whose draw is
    nearest. `validation=0` keeps all documents for training. Raises `UserError` for a fraction outside [0, 1), and for
    fewer than two documents where some are to be held out.
    """
    if not 0 <= validation < 1:
        raise ArgumentError(
            "validation", f" is {validation}: give the share of documents to hold out, from 0 (none) to below 1"
        )
    numbers = np.arange(documents, dtype=np.int64)
    if validation == 0:
        return Split(numbers, numbers[:0])
    if documents < 2:
        raise ArgumentError(
            "validation",
            f" is {validation}, but the corpus has {documents} document(s), and to hold some out needs at least 2. "
            "Give more documents, or 0 here to train on all",
        )
    draw = keyed_hash(numbers.astype(np.uint64), derive_key("split", seed)) / 2.0**64
    held_out = draw < validation
    held_out[draw.argmin()] = True
    held_out[draw.argmax()] = False
    return Split(numbers[~held_out], numbers[held_out])
