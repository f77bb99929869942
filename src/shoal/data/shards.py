"""A corpus as token ids on disk: tokenised once, then read through memory maps.

A directory has `index.json`, `offsets.bin` (int64 [documents + 1], the start of each document in the concatenation of
all tokens) and `shard-00000.bin`, ... (uint16 or uint32 ids, whole documents, each ending with the eos token).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .cache import build_once, fingerprint_of, tell
from .corpus import Corpus
from .tokens import Tokenizer

log = logging.getLogger(__name__)

FORMAT = 1
SHARD_TOKENS = 1 << 28  # a shard is closed by the document that reaches this: half a gigabyte of uint16
TELL = 3.0  # seconds between two lines of progress
ENCODE_CHARACTERS = 1 << 21  # text handed to the tokenizer at a time; its threads share it


@dataclass(frozen=True)
class FileRecord:
    """A file in `index.json`. `start`: the index of its first token, counted over all shards."""

    name: str
    start: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """The content of `index.json`: corpus, tokenizer and files. `dtype`: of the ids; `tokens`: with each eos."""

    format: int
    source: str  # fingerprint of the corpus
    tokenizer: str  # fingerprint
    dtype: str
    documents: int
    tokens: int
    offsets: FileRecord
    shards: tuple[FileRecord, ...]

    @property
    def files(self) -> tuple[FileRecord, ...]:
        return (self.offsets, *self.shards)

    @property
    def content(self) -> str:
        """A hash of all documents, as token ids; not of their source's name or time."""
        return fingerprint_of([file.sha256 for file in self.files])


@dataclass(frozen=True)
class Shards:
    """Open shards.

    offsets: the start of each document in the concatenation of all tokens, int64 [documents + 1].
    maps: memory maps of the shards, opened once.
    starts: the index of the first token of each shard, int64 [shards].
    """

    directory: Path
    index: Index
    offsets: NDArray[np.int64]
    maps: tuple[NDArray[np.unsignedinteger], ...]
    starts: NDArray[np.int64]

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns tokens [start, stop) of the concatenation of all tokens, which must lie in one document."""
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        first = int(self.starts[shard])
        return self.maps[shard][start - first : stop - first].astype(np.int64)

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return open_shards, (self.directory,)  # pickling the maps would copy every token


def build_shards(corpus: Corpus, tokenizer: Tokenizer, cache_dir: Path) -> Shards:
    """Opens the shards of `corpus` in `cache_dir`, tokenising it first where that was not done before.

    Many processes may call at once. Shards with a missing or truncated file are built again. Raises `UserError` for a
    corpus without documents, and for ids that the tokenizer does not have.
    """
    directory = cache_dir / "tokens" / fingerprint_of(FORMAT, corpus.fingerprint, tokenizer.fingerprint)
    build_once(directory, build=lambda unfinished: _write(corpus, tokenizer, unfinished), intact=_intact)
    return open_shards(directory)


def open_shards(directory: Path) -> Shards:
    """Opens the shards in `directory`, checking the size of each file; `damaged_files` checks the content.

    Raises `UserError` for damaged shards.
    """
    damaged = _files_of_wrong_size(directory)
    if damaged:
        raise UserError(
            f"token shards in {directory} are damaged: {', '.join(damaged)}. Delete the directory to have it built "
            "again"
        )
    index = _read_index(directory)
    return Shards(
        directory=directory,
        index=index,
        offsets=np.memmap(directory / index.offsets.name, np.int64, mode="r"),
        maps=tuple(np.memmap(directory / shard.name, np.dtype(index.dtype), mode="r") for shard in index.shards),
        starts=np.array([shard.start for shard in index.shards], dtype=np.int64),
    )


def damaged_files(directory: Path) -> list[str]:
    """Returns the names of missing files and of those with another size or SHA-256 than the index. Reads everything."""
    wrong_size = _files_of_wrong_size(directory)
    if wrong_size:
        return wrong_size
    return [file.name for file in _read_index(directory).files if _sha256(directory / file.name) != file.sha256]


# --- reading


def _read_index(directory: Path) -> Index:
    fields = json.loads((directory / "index.json").read_text())
    fields["offsets"] = FileRecord(**fields["offsets"])
    fields["shards"] = tuple(FileRecord(**shard) for shard in fields["shards"])
    return Index(**fields)


def _files_of_wrong_size(directory: Path) -> list[str]:
    try:
        index = _read_index(directory)
    except (FileNotFoundError, ValueError, TypeError, KeyError):  # missing; not JSON; not these fields
        return ["index.json"]
    sizes = {
        file.name: (directory / file.name).stat().st_size for file in index.files if (directory / file.name).is_file()
    }
    return [file.name for file in index.files if sizes.get(file.name) != file.bytes]


def _intact(directory: Path) -> bool:
    damaged = _files_of_wrong_size(directory)
    if damaged and directory.exists():
        log.warning("token shards in %s are damaged (%s): building them again", directory, ", ".join(damaged))
    return not damaged


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- writing


def _write(corpus: Corpus, tokenizer: Tokenizer, directory: Path) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    documents = _encoded(corpus, tokenizer, directory)
    lengths = array("q")
    shards: list[FileRecord] = []
    tokens = 0
    for first in documents:
        shard = _one_shard(chain([first], documents), lengths, dtype)
        shards.append(_write_file(directory / f"shard-{len(shards):05d}.bin", tokens, shard))
        tokens += shards[-1].bytes // dtype.itemsize
    if not shards:
        raise UserError(
            f"{corpus.name} has no documents, or only empty ones: there is nothing to train on. Check the source"
        )
    ends = np.cumsum(np.frombuffer(lengths, np.int64))
    index = Index(
        format=FORMAT,
        source=corpus.fingerprint,
        tokenizer=tokenizer.fingerprint,
        dtype=dtype.name,
        documents=len(lengths),
        tokens=tokens,
        offsets=_write_file(directory / "offsets.bin", 0, iter([np.concatenate([[0], ends])])),
        shards=tuple(shards),
    )
    (directory / "index.json").write_text(json.dumps(asdict(index), indent=1))


def _one_shard(documents: Iterator[NDArray[np.int64]], lengths: array[int], dtype: np.dtype) -> Iterator[NDArray]:
    """Yields the documents of one shard and appends their lengths to `lengths`."""
    tokens = 0
    for document in documents:
        yield document.astype(dtype)
        lengths.append(len(document))
        tokens += len(document)
        if tokens >= SHARD_TOKENS:
            return


def _write_file(path: Path, start: int, arrays: Iterator[NDArray]) -> FileRecord:
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for values in arrays:
            block = values.tobytes()
            size += file.write(block)
            digest.update(block)
        file.flush()
        os.fsync(file.fileno())  # else a power cut could leave zeros in a file of the right size
    return FileRecord(path.name, start, size, digest.hexdigest())


def _encoded(corpus: Corpus, tokenizer: Tokenizer, directory: Path) -> Iterator[NDArray[np.int64]]:
    """Yields the ids of each document, the last one eos."""
    for ids in _ids(corpus, tokenizer, directory):
        if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            raise UserError(
                f"{corpus.name} has token ids from {ids.min()} to {ids.max()}, but the tokenizer's run from 0 to "
                f"{tokenizer.vocab_size - 1}: give the tokenizer that made them"
            )
        ended = corpus.tokenised and ids[-1] == tokenizer.eos
        yield ids if ended else np.append(ids, tokenizer.eos)


def _ids(corpus: Corpus, tokenizer: Tokenizer, directory: Path) -> Iterator[NDArray[np.int64]]:
    batch: list[str] = []
    characters = read = 0
    told, what = time.monotonic(), "tokens" if corpus.tokenised else "characters"
    tell(directory, f"tokenising {corpus.name}")
    for document in corpus.stream():
        if time.monotonic() - told >= TELL:
            told = time.monotonic()
            tell(directory, f"tokenising {corpus.name}: {read / 1e6:,.1f} million {what} are read")
        read += len(document)
        if not isinstance(document, str):
            yield document
            continue
        batch.append(document)
        characters += len(document)
        if characters >= ENCODE_CHARACTERS:
            yield from tokenizer.encode_batch(batch)
            batch, characters = [], 0
    yield from tokenizer.encode_batch(batch)
