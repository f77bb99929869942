"""Opens a source of text as packed training and validation rows, in one call."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cache import default_cache_dir
from .corpus import open_corpus
from .pack import Attend, PackedText
from .shards import build_shards
from .split import split_documents
from .tokens import Tokenizer, open_tokenizer


@dataclass(frozen=True)
class TextData:
    """Two map-style datasets over the same shards. `validation` is None where nothing was held out; `content` is a hash
    of all documents."""

    train: PackedText
    validation: PackedText | None
    tokenizer: Tokenizer
    content: str


def open_text(
    source: Any,
    *,
    tokenizer: str | Path | Tokenizer = "bytes",
    sequence: int,
    validation: float = 0.05,
    attend: Attend = "row",
    seed: int = 0,
    cache_dir: str | Path | None = None,
    field: str = "text",
) -> TextData:
    """Opens rows of `sequence` tokens from `source`, which is tokenised on the first call and cached.

    source, field: see `open_corpus`: `"stdlib"`, a path, directory or glob of .txt/.jsonl/.parquet, or a
        `datasets.Dataset`.
    tokenizer: `"bytes"` (257 ids), `"bpe:4096"` (a byte-level BPE of at most that many ids, trained on about 8 MB of
        the training documents, evenly spread), the path of a `tokenizer.json` or of a directory with one, or a
        `Tokenizer`.
    validation: the share of documents held out, drawn with `seed`.
    attend: whether a row or a document is one context, see `PackedText`.
    cache_dir: where shards and trained tokenizers are kept; `default_cache_dir()` if None.

    Many processes may call it at once; one does the work. Raises `UserError` with a remedy.
    """
    cache = default_cache_dir() if cache_dir is None else Path(os.path.expanduser(cache_dir)).resolve()
    corpus = open_corpus(source, field)
    chosen = open_tokenizer(tokenizer, corpus, validation=validation, seed=seed, cache_dir=cache)
    shards = build_shards(corpus, chosen, cache)
    split = split_documents(shards.index.documents, validation, seed)

    def packed(documents: NDArray[np.int64]) -> PackedText:
        return PackedText(shards, documents, sequence=sequence, eos=chosen.eos, attend=attend)

    return TextData(
        train=packed(split.train),
        validation=packed(split.validation) if len(split.validation) else None,
        tokenizer=chosen,
        content=shards.index.content,
    )
