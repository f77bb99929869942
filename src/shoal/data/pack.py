"""Sequence packing: documents are concatenated and cut into rows of one length."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ArgumentError, UserError
from .shards import Shards

IGNORED = -100  # the label that torch's cross_entropy ignores

Attend = Literal["row", "document"]


class PackedText:
    """A map-style dataset of rows of the concatenated documents.

    shards: the tokens of all documents.
    documents: numbers of the documents to use, ascending; each document ends with eos.
    sequence: tokens in a row, T.
    eos: the id of the end-of-document token.
    attend: "row" or "document", see below.

    Row i has the tokens [i * T, (i + 1) * T) of the concatenation as `input_ids` (int64 [T]), and the tokens shifted by
    one as `labels` (int64 [T]). So every token but the first is a label exactly once per epoch, over
    ceil((tokens - 1) / T) rows; the last row is padded with eos, labelled -100.

    `attend="row"`: a row is one context, as usual in GPT pre-training; the first token of a document is predicted from
        the eos before it. `attend="document"`: each document of a row is a context of its own, which the model must
        separate. The first token of a document is then never a label, and a row also has `document_ids` (int64 [T], 0,
        1, ... within the row, the padding last) and `position_ids` (int64 [T], from 0 at the start of each document and
        of the row).

    Reading a row takes O(T + log documents) time through the memory maps. Raises `UserError` where `documents` have
    fewer than two tokens together.
    """

    def __init__(
        self, shards: Shards, documents: NDArray[np.int64], *, sequence: int, eos: int, attend: Attend = "row"
    ) -> None:
        if sequence < 1:
            raise ArgumentError("sequence", f" is {sequence}: give the number of tokens in a row, at least 1")
        if attend not in ("row", "document"):
            raise ArgumentError("attend", f' is {attend!r}: give "row" or "document"')
        self.sequence = sequence
        self.attend = attend
        self._shards, self._documents = shards, documents
        self._eos = eos
        self._sources = shards.offsets[documents]  # starts of the documents in the shards
        lengths = shards.offsets[documents + 1] - self._sources
        self._starts = np.concatenate([[0], np.cumsum(lengths)])  # starts in the concatenation; the last is its end
        if self.tokens < 2:
            raise UserError(f"{len(documents)} document(s) with {self.tokens} token(s) make no row: give more text")

    def __repr__(self) -> str:
        return f'PackedText({len(self):,} rows of {self.sequence} tokens, attend="{self.attend}")'

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, with its eos."""
        return np.diff(self._starts)

    def part(self, which: NDArray[np.int64]) -> PackedText:
        """Returns rows of some of the documents: the `which`-th of these, ascending."""
        return PackedText(
            self._shards, self._documents[which], sequence=self.sequence, eos=self._eos, attend=self.attend
        )

    @property
    def tokens(self) -> int:
        """The number of tokens, with the eos of each document."""
        return int(self._starts[-1])

    def __len__(self) -> int:
        return -(-(self.tokens - 1) // self.sequence)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        begin = row * self.sequence
        tokens, documents = self._read(begin, begin + self.sequence + 1)
        inputs, labels = tokens[:-1], tokens[1:].copy()
        left = self.tokens - begin  # tokens from here to the end; the rest of the row is padding
        inputs[left:] = self._eos
        labels[max(left - 1, 0) :] = IGNORED
        sample = {"input_ids": inputs.copy(), "labels": labels}
        if self.attend == "document":
            labels[documents[1:] != documents[:-1]] = IGNORED
            sample["document_ids"] = documents[:-1]
            sample["position_ids"] = _positions(documents[:-1])
        return {name: torch.from_numpy(values) for name, values in sample.items()}

    def _read(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns tokens [begin, end) of the concatenation, and the number of each one's document, from 0."""
        tokens = np.full(end - begin, self._eos, dtype=np.int64)
        documents = np.empty(end - begin, dtype=np.int64)
        document = first = int(np.searchsorted(self._starts, begin, side="right")) - 1
        at = begin
        while at < min(end, self.tokens):
            stop = min(int(self._starts[document + 1]), end)
            source = int(self._sources[document]) + at - int(self._starts[document])
            tokens[at - begin : stop - begin] = self._shards.read(source, source + stop - at)
            documents[at - begin : stop - begin] = document - first
            at = stop
            document += 1
        documents[at - begin :] = document - first
        return tokens, documents


def _positions(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns positions that restart at 0 where the document changes: [5, 5, 5, 6, 6] gives [0, 1, 2, 0, 1]."""
    numbers = np.arange(len(documents))
    is_start = np.diff(documents, prepend=-1) != 0
    return numbers - np.maximum.accumulate(np.where(is_start, numbers, 0))
