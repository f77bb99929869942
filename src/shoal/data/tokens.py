"""Tokenizers: bytes, a byte-level BPE trained on the corpus, or an existing `tokenizer.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, UserError
from .cache import build_once, fingerprint_of, tell
from .corpus import Corpus
from .split import split_documents

if TYPE_CHECKING:
    import tokenizers  # imported where it is used: the engine runs where only torch is installed

END_OF_TEXT = "<|endoftext|>"
KNOWN_EOS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""End-of-text tokens of GPT-2 and its relatives, Llama 3, Llama 2 and T5, Gemma, BERT."""
SPECIAL_IN_TEXT = "shoal_special_in_text"  # our key in tokenizer_config.json, see `load_tokenizer`
TRAINING_CHARACTERS = 8_000_000  # merges learned on more text differ little, and training time grows with it
MOST_IDS = 1 << 20  # of a vocabulary that is trained: the library makes room for all of them before it begins


@runtime_checkable
class Tokenizer(Protocol):
    """Converts text to ids in range(vocab_size) and back. `encode` never adds `eos`, `decode` drops it.

    Equal `fingerprint`s mean equal ids for every text.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class ByteTokenizer:
    """A tokenizer whose ids 0 to 255 are the bytes of UTF-8, and 256 the end of a document."""

    vocab_size: int = 257
    eos: int = 256
    fingerprint: str = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != self.eos).decode(errors="replace")


@dataclass(frozen=True)
class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library. `file`: its `tokenizer.json`."""

    library: tokenizers.Tokenizer
    vocab_size: int
    eos: int
    fingerprint: str
    file: Path

    def encode(self, text: str) -> list[int]:
        return self.library.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self.library.decode([int(i) for i in ids if i != self.eos], skip_special_tokens=False)


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> bool:
    """Writes `tokenizer.json` and `tokenizer_config.json` to `directory`, for `load_tokenizer` and for
    `AutoTokenizer.from_pretrained`, which give the same ids, also for bytes.

    Returns False, and writes nothing, for a tokenizer class of the caller's own.
    """
    if not isinstance(tokenizer, ByteTokenizer | LibraryTokenizer):
        return False
    directory.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = {}
    if isinstance(tokenizer, ByteTokenizer):
        content = _bytes_as_library().to_str().encode()
        eos, special_in_text = END_OF_TEXT, False
    else:
        content = tokenizer.file.read_bytes()
        known = _beside(tokenizer.file)
        eos = tokenizer.library.id_to_token(tokenizer.eos) or END_OF_TEXT
        special_in_text = not tokenizer.library.encode_special_tokens
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, **known, SPECIAL_IN_TEXT: special_in_text}
    files = {"tokenizer.json": content, "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode()}
    for name, content in files.items():
        fresh = directory / f"{name}.tmp"
        fresh.write_bytes(content)
        fresh.replace(directory / name)  # atomic: on a full disk the old file stays
    return True


def _bytes_as_library() -> tokenizers.Tokenizer:
    """Returns the library's equivalent of `ByteTokenizer`: a BPE without merges."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    # The library's characters for bytes, as in GPT-2: printable bytes are themselves, the others are 256 and up.
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printing else next(others)): byte for byte in range(256)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([END_OF_TEXT])
    return library


def load_tokenizer(path: str | Path, *, special_in_text: bool | None = None) -> LibraryTokenizer:
    """Reads a `tokenizer.json`, or the directory of a Hugging Face tokenizer that has one.

    The end-of-document token is the `eos_token` of the `tokenizer_config.json` beside it, or else the first of
    `KNOWN_EOS` in the vocabulary.

    special_in_text: whether text that spells a special token gives that token, as in `transformers`; if False, a
        document cannot contain its own end. By default as `save_tokenizer` recorded it, or else True.

    Raises `UserError` where the file is missing or broken, or has no end-of-document token.
    """
    file = Path(os.path.expanduser(path))
    if os.path.isdir(file):
        file /= "tokenizer.json"
    if not os.path.isfile(file):
        raise ArgumentError(
            "tokenizer",
            f": there is none at {file!s:.300}. Give 'bytes', 'bpe:SIZE', a tokenizer.json or a directory with one "
            "(transformers writes it by AutoTokenizer.from_pretrained(...).save_pretrained(directory))",
        )
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise UserError(
            f"{file} is not a tokenizer.json: {error}. Delete it if Shoal made it, else get a whole one"
        ) from error
    if special_in_text is None:
        special_in_text = _beside(file).get(SPECIAL_IN_TEXT, True)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = not special_in_text
    vocabulary = library.get_vocab(with_added_tokens=True)
    eos = _eos_token(file, vocabulary)
    return LibraryTokenizer(
        library=library,
        vocab_size=max(vocabulary.values()) + 1,  # ids may have gaps
        eos=vocabulary[eos],
        fingerprint=fingerprint_of(library.to_str(), eos, special_in_text),
        file=file,
    )


def _eos_token(file: Path, vocabulary: dict[str, int]) -> str:
    named = _beside(file).get("eos_token")
    if isinstance(named, dict):  # an AddedToken as transformers writes it
        named = named.get("content")
    if not isinstance(named, str | None):
        raise UserError(f"{file.with_name('tokenizer_config.json')}: eos_token = {named!r:.100}: give a text")
    candidates = [named] if named else list(KNOWN_EOS)
    for token in candidates:
        if token in vocabulary:
            return token
    raise UserError(
        f"{file} has no end-of-document token: looked for {', '.join(candidates)}. "
        f'Add one to its vocabulary, and name it as "eos_token" in tokenizer_config.json beside it'
    )


def _beside(file: Path) -> dict[str, Any]:
    """Reads the `tokenizer_config.json` beside `file`; empty where there is none. Raises UserError for a broken one."""
    config = file.with_name("tokenizer_config.json")
    if not config.is_file():
        return {}
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{config} cannot be read: {error}. Get a whole one, or remove it") from error
    if not isinstance(content, dict):
        raise UserError(f"{config} is no JSON object. Get a whole one, or remove it")
    return content


def open_tokenizer(spec: Any, corpus: Corpus, *, validation: float, seed: int, cache_dir: Path) -> Tokenizer:
    """Returns the tokenizer that `spec` names: `"bytes"`, `"bpe:SIZE"`, a path for `load_tokenizer`, or a `Tokenizer`.

    `"bpe:SIZE"` is trained once on training documents of `corpus` (see `train_bpe`) and kept in `cache_dir`. Raises
    `UserError` for anything else.
    """
    if isinstance(spec, Tokenizer):
        return spec
    if not isinstance(spec, str | Path):
        raise ArgumentError(
            "tokenizer", f" is a {type(spec).__name__}: give 'bytes', 'bpe:SIZE', a path, or a shoal.data.Tokenizer"
        )
    if str(spec) == "bytes":
        return ByteTokenizer()
    if not str(spec).startswith("bpe:"):
        return load_tokenizer(spec)
    vocab_size = _bpe_size(str(spec))
    if corpus.tokenised:
        raise ArgumentError(
            "tokenizer",
            f" is {spec}, but {corpus.name} is tokenised already: give the tokenizer that made its input_ids",
        )
    key = fingerprint_of("bpe", corpus.fingerprint, vocab_size, validation, seed, TRAINING_CHARACTERS)
    directory = cache_dir / "tokenizers" / key

    def build(unfinished: Path) -> None:
        tell(unfinished, f"training a tokenizer of {vocab_size} ids on {corpus.name}")
        train_bpe(corpus, vocab_size, validation, seed).save(str(unfinished / "tokenizer.json"))

    build_once(directory, build=build, intact=lambda finished: (finished / "tokenizer.json").is_file())
    return load_tokenizer(directory, special_in_text=False)


def _bpe_size(spec: str) -> int:
    size = spec.removeprefix("bpe:")
    if not size.isdecimal() or len(size) > 9 or not 257 <= int(size) <= MOST_IDS:
        raise ArgumentError(
            "tokenizer",
            f" is {spec!r:.100}: give bpe:SIZE with a vocabulary of at least 257 (256 bytes and the end) and at most "
            f"{MOST_IDS}, as bpe:4096",
        )
    return int(size)


def train_bpe(corpus: Corpus, vocab_size: int, validation: float, seed: int) -> tokenizers.Tokenizer:
    """Trains a byte-level BPE of at most `vocab_size` ids on the training side of `split_documents`.

    If there are more than `TRAINING_CHARACTERS` of training text, only every k-th document is used, so that about that
    many characters are spread evenly over it. The corpus is streamed twice: once to count, once to learn.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(_training_text(corpus, validation, seed), trainer)
    return library


def _training_text(corpus: Corpus, validation: float, seed: int) -> Iterator[str]:
    lengths = np.fromiter((len(document) for document in corpus.stream()), np.int64)
    train = split_documents(len(lengths), validation, seed).train
    stride = -(-int(lengths[train].sum()) // TRAINING_CHARACTERS) or 1
    chosen = set(train[::stride].tolist())
    left = TRAINING_CHARACTERS
    for number, text in enumerate(corpus.stream()):
        if number in chosen and left > 0:
            assert isinstance(text, str)
            yield text[:left]
            left -= len(text)
