"""Sources of documents: the standard library, local files, a Hugging Face dataset. Documents are streamed."""

from __future__ import annotations

import codecs
import glob
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, UserError, did_you_mean
from .cache import fingerprint_of
from .stamps import stamps

Document = str | NDArray[np.int64]

TEXT_PIECE = 1 << 16  # characters after which a .txt file starts a new document at the next line end
READ_BATCH = 256  # rows of a columnar source in memory at a time
# Tests are two thirds of the library's bytes, many of them tables and files broken on purpose.
SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order.

    name: for messages.
    fingerprint: changes when the source of the documents changes.
    stream: returns an iterator over the documents from the first one, without empty ones.
    tokenised: documents are int64 arrays of token ids instead of text.
    groups: returns what each document belongs to, in their order; None where each stands by itself.
    """

    name: str
    fingerprint: str
    stream: Callable[[], Iterator[Document]]
    tokenised: bool = False
    groups: Callable[[], list[str]] | None = None


def open_corpus(source: Any, field: str = "text") -> Corpus:
    """Opens the documents of `source`:

    - `"stdlib"`: a document for each Python source file of the running interpreter's standard library, ordered by path,
      without its tests and without installed packages; files that are not UTF-8 are left out. Its groups are packages.
    - a file, a directory (searched recursively, other suffixes ignored) or a glob (`**` crosses directories) of
      `.txt` (UTF-8; a document is a file; longer files are cut at the first line end after each 65,536 characters, so
      that a large file can be streamed and split), `.jsonl` (one object per line, its `field`) and `.parquet` (column
      `field`);
    - a `datasets.Dataset` with a column `field` of text, or else `input_ids` of tokens.

    Empty and null documents are left out. Raises `UserError` for what is missing or unreadable, here or while
    streaming.
    """
    if not isinstance(source, str | Path):
        return _from_dataset(source, field)
    if str(source) == "stdlib":
        return _from_stdlib()
    files = _find_files(str(source))
    return Corpus(
        name=str(source),
        fingerprint=fingerprint_of("files", field, stamps(files)),
        stream=lambda: (text for path in files for text in READERS[path.suffix](path, field) if text),
    )


# --- the standard library


def _from_stdlib() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for directory, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIPPED_DIRECTORIES]  # not walked: packages may be many
        files += (Path(directory, name) for name in names if name.endswith(".py"))
    files.sort()
    if not files:
        raise UserError(
            f"the standard library has no source files under {root}: give a file or directory of text instead"
        )
    return Corpus(
        "stdlib",
        fingerprint_of("stdlib", stamps(files)),
        lambda: (text for _, text in _utf8_sources(files)),
        groups=lambda: [path.relative_to(root).parts[0].removesuffix(".py") for path, _ in _utf8_sources(files)],
    )


def _utf8_sources(files: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # the rule of open_corpus
        if text:
            yield path, text


# --- files


def _find_files(source: str) -> list[Path]:
    path = Path(os.path.expanduser(source))
    if os.path.isdir(path):  # which, unlike Path.is_dir, is False for a text that is too long to be a path
        files = [file for file in path.rglob("*") if file.suffix in READERS and file.is_file()]
        nothing = f"the directory {source} has no {_suffixes()} file: put some there, or name another"
    elif os.path.isfile(path):
        files = [path]
    else:
        files = [Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file()]
        nothing = (
            f"no such file, directory or glob: {source:.300} (from {Path.cwd()}). Check the path; the built-in corpus "
            "is stdlib"
        )
    if not files:
        raise UserError(nothing)
    for file in files:
        if file.suffix not in READERS:
            raise UserError(
                f"{file}: unknown suffix {file.suffix or '(none)'}. Documents are read from {_suffixes()} files"
            )
        if file.suffix == ".parquet":
            _import_parquet()
    return sorted(file.resolve() for file in files)


def _suffixes() -> str:
    return ", ".join(READERS)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8: {_first_bad_byte(path)}. Convert it (iconv -f LATIN1 -t UTF-8, if that is what it "
            "is), or leave it out"
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Check the file and its permissions") from error


def _first_bad_byte(path: Path) -> str:
    """Finds the first byte of a file that is not UTF-8; a stream decoder's offset counts only from its own block."""
    decoder, offset, lines = codecs.getincrementaldecoder("utf-8")(), 0, 1
    with open(path, "rb") as file:
        while True:
            block = file.read(TEXT_PIECE)
            held = decoder.getstate()[0]
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                lines += error.object[: error.start].count(b"\n")
                position, byte = offset - len(held) + error.start, error.object[error.start]
                return f"byte 0x{byte:02x} at offset {position:,}, in line {lines:,} ({error.reason})"
            if not block:  # another process has repaired it
                return "it was not when it was read"
            offset, lines = offset + len(block), lines + block.count(b"\n")


def _txt_documents(path: Path, field: str) -> Iterator[str]:
    with _reading(path), open(path, encoding="utf-8-sig") as file:
        while lines := file.readlines(TEXT_PIECE):
            yield "".join(lines)


def _jsonl_documents(path: Path, field: str) -> Iterator[str]:
    with _reading(path), open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _jsonl_text(line, field, where=f"{path}:{number}")


def _jsonl_text(line: str, field: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also for a number of thousands of digits, or deeply nested lists
        what = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(f"{where} is not JSON ({what}): a .jsonl file has one object a line") from error
    if not isinstance(row, dict):
        raise UserError(f"{where} is a {type(row).__name__}: a .jsonl file has one object a line")
    if field not in row:
        raise _missing_field(where, field, list(row))
    # JSON can encode half of a surrogate pair, which no tokenizer accepts.
    return _text(row[field], field, where).encode("utf-8", "replace").decode()


def _parquet_documents(path: Path, field: str) -> Iterator[str]:
    parquet = _import_parquet()
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow raises its ArrowInvalid, a ValueError, for what is not Parquet
        raise UserError(f"{path} cannot be read as Parquet: {error}") from error
    with file:
        if field not in file.schema_arrow.names:
            raise _missing_field(str(path), field, file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=READ_BATCH, columns=[field]):
            for value in batch.column(0).to_pylist():
                yield _text(value, field, str(path))


def _import_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("reading .parquet needs pyarrow, which is not installed: pip install 'shoal[hf]'") from error
    return pyarrow.parquet


def _text(value: Any, field: str, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ArgumentError(
            "field",
            f' is "{field}", which is a {type(value).__name__} in {where}, not text. Name the one that holds the '
            "documents",
        )
    return value


def _missing_field(where: str, field: str, names: list[str]) -> ArgumentError:
    known = ", ".join(names) or "nothing"
    return ArgumentError(
        "field",
        f' is "{field}", but {where} has {known}.{did_you_mean(field, names)} Name the one that holds the documents',
    )


READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".txt": _txt_documents,
    ".jsonl": _jsonl_documents,
    ".parquet": _parquet_documents,
}


# --- Hugging Face datasets


def _from_dataset(dataset: Any, field: str) -> Corpus:
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, dict):
        raise UserError(
            f"this dataset has the splits {', '.join(columns)}: give one of them, such as "
            f"dataset[{next(iter(columns))!r}]"
        )
    if columns is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "select_columns"):
        raise UserError(
            f"cannot read documents from a {type(dataset).__name__}: give 'stdlib', a path, or a datasets.Dataset "
            "(a streaming dataset can be trained on as an IterableSource)"
        )
    column = field if field in columns else "input_ids"
    if column not in columns:
        raise _missing_field("the dataset", field, columns)
    tokenised = column != field

    def stream() -> Iterator[Document]:
        for rows in dataset.select_columns([column]).iter(batch_size=READ_BATCH):
            for value in rows[column]:
                document = np.asarray(value, dtype=np.int64) if tokenised else _text(value, field, "the dataset")
                if len(document):
                    yield document

    # The library names its own cache files by this attribute; hashing the content would cost a pass at each start.
    return Corpus("the dataset", fingerprint_of("datasets", column, dataset._fingerprint), stream, tokenised)
