"""The whole road: source, tokens, shards, split, rows."""

import pytest
import torch

from shoal.data import corpus, open_text, text
from shoal.data.cache import default_cache_dir
from shoal.errors import UserError


@pytest.fixture
def books(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.txt").write_text(f"book {number} has its own words, and a few that all books have\n")
    return folder


@pytest.mark.fast
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_both_sides_together_are_the_corpus(books, tmp_path, tokenizer):
    data = open_text(books, tokenizer=tokenizer, sequence=1000, validation=0.3, cache_dir=tmp_path / "cache")
    assert data.validation is not None
    texts = []
    for side in (data.train, data.validation):
        ids = torch.cat([side[0]["input_ids"][:1], side[0]["labels"]]).tolist()
        found = data.tokenizer.decode([i for i in ids if i != -100]).splitlines(keepends=True)
        assert found == sorted(found)  # a side keeps the order
        texts += found
    assert sorted(texts) == [path.read_text() for path in sorted(books.iterdir())]


@pytest.mark.fast
def test_a_second_call_reads_no_document(books, tmp_path, monkeypatch):
    options = {"tokenizer": "bpe:300", "sequence": 8, "cache_dir": tmp_path / "cache"}
    first = open_text(books, **options)
    monkeypatch.setitem(corpus.READERS, ".txt", lambda path, field: pytest.fail("read a document again"))
    second = open_text(books, **options)
    assert len(first.train) == len(second.train)
    assert all(torch.equal(first.train[i]["labels"], second.train[i]["labels"]) for i in range(len(first.train)))


@pytest.mark.fast
def test_one_document_needs_validation_off(books, tmp_path):
    options = {"sequence": 8, "cache_dir": tmp_path / "cache"}
    with pytest.raises(UserError, match=r"validation is 0.05.*or 0 here to train on all"):
        open_text(books / "1.txt", **options)
    data = open_text(books / "1.txt", validation=0, attend="document", **options)
    assert data.validation is None
    assert "position_ids" in data.train[0]


@pytest.mark.fast
def test_where_the_cache_is(books, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "shoal"
    text.open_text(books, sequence=8)
    assert (tmp_path / "xdg" / "shoal" / "tokens").is_dir()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "shoal"


@pytest.mark.fast
def test_a_user_without_a_home_is_told_to_name_a_cache(monkeypatch):
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(UserError, match="XDG_CACHE_HOME to a directory"):
        default_cache_dir()
