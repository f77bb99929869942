"""Documents in rows of tokens: who sees whom, where documents begin, and how far back attention looks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UserError
from shoal.models.attention import document_mask
from shoal.module.random.by_thread import OpenByThread


def documents_of(microbatch: Mapping[str, Tensor], takes_documents: bool, takes_padding: bool) -> Tensor | None:
    """Returns the document [B, T] of each token of whole rows; None where a row is one document.

    takes_documents: the model masks by `document_ids`, which are in the microbatch
    takes_padding: it is one of transformers, which begins a document where positions start anew
    """
    if takes_documents:
        return microbatch.get("document_ids")
    positions = microbatch.get("position_ids")
    if not takes_padding or positions is None:
        return None
    return stretches(positions)


class _Searching(OpenByThread[Callable[[], bool]]):
    """Who is asked when a model of transformers looks for documents in positions."""

    def _give_way(self) -> None:
        self._masks = sys.modules.get("transformers.masking_utils")
        if self._masks is not None:
            self._search = self._masks.find_packed_sequence_indices
            self._masks.find_packed_sequence_indices = self._found  # type: ignore[attr-defined]

    def _put_back(self) -> None:
        if self._masks is not None:
            self._masks.find_packed_sequence_indices = self._search  # type: ignore[attr-defined]

    def _found(self, position_ids: Tensor) -> Tensor | None:
        told = self.here()
        return None if told is not None and told() else self._search(position_ids)


_searching = _Searching()


@contextmanager
def searching(told: Callable[[], bool]) -> Iterator[None]:
    """Has models of transformers that look for documents in positions, in this thread and inside the context, call
    `told`; where that is true they find none."""
    _searching.enter(told)
    try:
        yield
    finally:
        _searching.leave()


def window_of(config: Any) -> int | None:
    """Returns how many tokens back attention sees, by the configuration of a model of transformers; None: all."""
    found = []
    for each in (config, getattr(config, "text_config", None)):
        if getattr(each, "use_sliding_window", True):
            found.append(getattr(each, "sliding_window", None))
        found.append(getattr(each, "attention_chunk_size", None))
    return min((size for size in found if isinstance(size, int)), default=None)


def stretches(positions: Tensor) -> Tensor:
    """Returns a number for each stretch of tokens [B, T] whose positions follow each other."""
    begins = torch.ones_like(positions)
    begins[:, 1:] = (positions[:, 1:] != positions[:, :-1] + 1).long()
    return begins.cumsum(1)


def check_learned(mask: Tensor, ranks: int) -> None:
    """Raises UserError for a `mask` that is trained, as a bias by distance is: whatever its values are, it is no mask,
    and, all zeros as it may begin, would be taken for one of a document, and never trained."""
    if mask.requires_grad:
        raise UserError(
            f"plan.cp = {ranks}: attention adds what the model computes or learns {tuple(mask.shape)} to its scores, "
            "which cannot be cut by tokens: take plan.cp = 1"
        )


def is_causal_mask(mask: Tensor, documents: Tensor, begins: Tensor, ranks: int) -> bool:
    """Returns whether a model's `mask` of a rank's tokens is causal; false if all tokens of a document see each other.

    documents: the document [B, T] of each token, or of each of one row [1, T]
    begins: the same as transformers counts them, which begins one at every position that does not follow the one before
    ranks: those that share a row

    Raises UserError for a mask that is neither.
    """
    seen = mask if mask.dtype == torch.bool else mask == 0
    candidates = [(documents, True), (documents, False), (begins, True)]
    for each, causal in candidates if seen.shape[-1] > 1 else candidates[1:2]:
        known = document_mask(each, causal)
        if seen.shape[-2:] == known.shape[-2:] and bool((seen == known).all()):
            return causal
    raise UserError(
        f"plan.cp = {ranks}: attention with a mask {tuple(mask.shape)} that is neither causal nor that of documents "
        "(document_ids) cannot be cut by tokens: take plan.cp = 1"
    )
