"""Documents out of every kind of source, and what is said where one cannot be read."""

import builtins
import json
import os
import subprocess
import sysconfig

import pytest

from shoal.data import open_corpus
from shoal.data.corpus import TEXT_PIECE
from shoal.errors import UserError


def documents(source, **options) -> list:
    return list(open_corpus(source, **options).stream())


@pytest.fixture
def folder(tmp_path):
    """b.txt, sub/a.jsonl with an empty and a null document, and a file of another kind."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("bee\n")
    (tmp_path / "sub" / "a.jsonl").write_text(
        '{"text": "one", "n": 1}\n\n{"text": ""}\n{"text": null}\n{"text": "zwölf"}\n'
    )
    (tmp_path / "notes.md").write_text("not read")
    return tmp_path


@pytest.mark.fast
def test_stdlib_is_source_code_in_a_fixed_order():
    corpus = open_corpus("stdlib")
    assert not corpus.tokenised
    texts = list(corpus.stream())
    assert len(texts) > 100
    assert all(texts)
    assert texts == list(corpus.stream())
    assert open_corpus("stdlib").fingerprint == corpus.fingerprint
    with open(json.__file__, encoding="utf-8") as file:
        assert file.read() in texts


@pytest.mark.fast
def test_stdlib_leaves_out_packages_tests_and_what_is_not_utf8(tmp_path, monkeypatch):
    for name in ("b.py", "a/x.py", "test/t.py", "a/tests/t.py", "site-packages/p/p.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "c.py").write_bytes(b"# caf\xe9")
    (tmp_path / "d.py").write_text("")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert documents("stdlib") == ["a/x.py", "b.py"]


@pytest.mark.fast
def test_directory_glob_and_file(folder):
    assert documents(folder) == ["bee\n", "one", "zwölf"]
    assert documents(str(folder / "**" / "*.jsonl")) == ["one", "zwölf"]
    assert documents(folder / "b.txt") == ["bee\n"]


@pytest.mark.fast
def test_field_of_another_name(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n')
    assert documents(tmp_path, field="body") == ["one"]


@pytest.mark.fast
def test_half_a_surrogate_pair_is_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n')
    assert documents(tmp_path) == ["a?b"]


@pytest.mark.fast
def test_a_long_text_file_is_cut_at_line_ends(tmp_path):
    line = "x" * 99 + "\n"
    (tmp_path / "long.txt").write_text(line * 2000)
    pieces = documents(tmp_path / "long.txt")
    assert "".join(pieces) == line * 2000
    assert len(pieces) == 4  # 200,000 characters in pieces of 65,600
    assert all(TEXT_PIECE <= len(piece) < TEXT_PIECE + len(line) and piece.endswith("\n") for piece in pieces[:-1])


@pytest.mark.fast
def test_fingerprint_follows_the_files(folder):
    before = open_corpus(folder).fingerprint
    assert open_corpus(folder).fingerprint == before
    assert open_corpus(folder, field="body").fingerprint != before
    (folder / "b.txt").write_text("wasp")
    os.utime(folder / "b.txt", (1, 1))
    changed = open_corpus(folder).fingerprint
    assert changed != before
    os.utime(folder / "b.txt", (2, 2))
    assert open_corpus(folder).fingerprint != changed


@pytest.mark.fast
@pytest.mark.parametrize("at", [0, 140_000, -1])
def test_fingerprint_follows_an_edit_that_leaves_size_and_time(folder, at):
    """As an editor's that sets the time back, or two in one tick of the clock."""
    large, small = folder / "large.txt", folder / "b.txt"
    text = bytearray(b"a" * 300_000)
    for file, content in (large, bytes(text)), (small, b"bees"):
        file.write_bytes(content)
        os.utime(file, (1, 1))
    before = open_corpus(folder).fingerprint
    text[at] = ord("b")
    large.write_bytes(text)
    os.utime(large, (1, 1))
    after = open_corpus(folder).fingerprint
    assert after != before
    small.write_bytes(b"wasp")
    os.utime(small, (1, 1))
    assert open_corpus(folder).fingerprint != after


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = pa.table({"text": ["one", None, "", "two"] * 200, "n": range(800)})
    parquet.write_table(rows, tmp_path / "a.parquet")
    assert documents(tmp_path) == ["one", "two"] * 200
    with pytest.raises(UserError, match=r'^field is "txt", but .*a.parquet has text, n. Did you mean "text"'):
        documents(tmp_path, field="txt")
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        documents(tmp_path)


@pytest.mark.fast
def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    original = builtins.__import__

    def without_pyarrow(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"pip install 'shoal\[hf\]'"):
        open_corpus(tmp_path)


def test_hugging_face_dataset():
    datasets = pytest.importorskip("datasets")
    text = datasets.Dataset.from_dict({"text": ["one", "", "two"], "n": [1, 2, 3]})
    assert documents(text) == ["one", "two"]
    assert open_corpus(text).fingerprint != open_corpus(text.select([0])).fingerprint
    tokens = open_corpus(datasets.Dataset.from_dict({"input_ids": [[1, 2], [], [3]]}))
    assert tokens.tokenised
    assert [ids.tolist() for ids in tokens.stream()] == [[1, 2], [3]]
    with pytest.raises(UserError, match=r'field is "text", but the dataset has n.'):
        open_corpus(text.remove_columns("text"))
    with pytest.raises(UserError, match="has the splits train"):
        open_corpus(datasets.DatasetDict(train=text))
    with pytest.raises(UserError, match=r"IterableDataset.*IterableSource"):
        open_corpus(text.to_iterable_dataset())


BAD_LINES = {
    '{"text": "a"': r"a.jsonl:2 is not JSON",
    '{"text": "a", "n": ' + "9" * 5000 + "}": r"a.jsonl:2 is not JSON",
    '{"text": "a", "n": ' + "[" * 100_000: r"a.jsonl:2 is not JSON",
    "[1]": r"a.jsonl:2 is a list",
    '{"tex": "a"}': r'^field is "text", but .*a.jsonl:2 has tex. Did you mean "tex"',
    '{"text": 5}': r'^field is "text", which is a int in .*a.jsonl:2, not text',
}


@pytest.mark.fast
@pytest.mark.parametrize(("line", "says"), BAD_LINES.items(), ids=map(str, range(len(BAD_LINES))))
def test_a_bad_line_is_named(tmp_path, line, says):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(UserError, match=says):
        documents(tmp_path)


@pytest.mark.fast
def test_missing_and_unknown(tmp_path):
    with pytest.raises(UserError, match="no such file, directory or glob"):
        open_corpus(tmp_path / "none.txt")
    with pytest.raises(UserError, match=r"has no \.txt, \.jsonl, \.parquet file"):
        open_corpus(tmp_path)
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(UserError, match=r"unknown suffix \.csv"):
        open_corpus(tmp_path / "*.csv")
    with pytest.raises(UserError, match="cannot read documents from a int"):
        open_corpus(3)


@pytest.mark.fast
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
@pytest.mark.parametrize("before", [0, 3, TEXT_PIECE - 1, 3 * TEXT_PIECE + 5])
def test_the_byte_that_is_not_utf_8_is_found(tmp_path, suffix, before):
    """Also far behind the blocks in which files are read, and where a block cuts a character in two."""
    line = '{"text": "ünï"}\n'.encode()
    whole = (line * (before // len(line) + 1))[:before].rpartition(b"\n")[0]
    path = tmp_path / f"bad.{suffix}"
    path.write_bytes(whole + b"\n" + '{"text": "Grün"}\n'.encode("latin-1") + line)
    offset = path.read_bytes().index(b"Gr\xfcn") + 2
    with pytest.raises(
        UserError,
        match=rf"bad\.{suffix} is not UTF-8: byte 0xfc at offset {offset:,}, in line {whole.count(10) + 2:,} \(",
    ):
        documents(path)
    mended = subprocess.run(["iconv", "-f", "LATIN1", "-t", "UTF-8", path], capture_output=True, check=True).stdout
    path.write_bytes(mended)
    documents(path)


@pytest.mark.fast
def test_a_character_cut_off_at_the_end_is_not_utf_8(tmp_path):
    (tmp_path / "cut.txt").write_bytes(b"ab\n" + "ü".encode()[:1])
    with pytest.raises(UserError, match=r"byte 0xc3 at offset 3, in line 2 \(unexpected end of data\)"):
        documents(tmp_path / "cut.txt")
