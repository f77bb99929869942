"""Documents in rows of tokens: who sees whom, where documents begin, and how far back attention looks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def documents_of(microbatch: Mapping[str, Tensor], takes_documents: bool, takes_padding: bool) -> Tensor | None:
    """Returns the document [B, T] of each token of whole rows; None where a row is one document.

    takes_documents: the model masks by `document_ids`, which are in the microbatch
    takes_padding: it is one of transformers, which begins a document where positions start anew
    """
    if takes_documents:
        return microbatch.get("document_ids")
    positions = microbatch.get("position_ids")
    if not takes_padding or positions is None or "attention_mask" in microbatch:
        return None
    return stretches(positions)


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
