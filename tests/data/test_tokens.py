"""Tokenizers: round trips, the end of a document, training once, and what is said of a bad one."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import ByteTokenizer, Corpus, Tokenizer, load_tokenizer, save_tokenizer, split_documents, tokens
from shoal.data.tokens import open_tokenizer
from shoal.errors import UserError

WORDS = ["the cat sat on the mat\n", "the dog sat on the log\n", "a cat and a dog\n", "on the mat the cat\n"] * 5


def corpus(documents=WORDS) -> Corpus:
    return Corpus("words", "fingerprint", lambda: iter(documents))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Tokenizer:
    return open_tokenizer("bpe:270", corpus(), validation=0.2, seed=0, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.mark.fast
@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, tokenizer.eos]) == text
    assert [list(batch) for batch in tokenizer.encode_batch([text, "é"])] == [ids, [0xC3, 0xA9]]


@pytest.mark.fast
def test_bytes_vocabulary():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eos) == (257, 256)
    assert tokenizer.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.fast
@settings(max_examples=50)
@given(text=st.text())
def test_bpe_round_trip(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode([*ids, bpe.eos]) == text
    assert all(0 <= i < bpe.vocab_size and i != bpe.eos for i in ids)
    assert bpe.encode_batch([text, "cat"])[0].tolist() == ids


@pytest.mark.fast
def test_bpe_has_learned_the_words(bpe):
    assert bpe.vocab_size == 270
    assert len(bpe.encode("the cat sat on the mat\n")) < 12  # 23 bytes


@pytest.mark.fast
def test_bpe_never_reads_the_end_token_out_of_a_document(bpe):
    assert bpe.eos not in bpe.encode("a<|endoftext|>b")
    assert bpe.eos not in bpe.encode_batch(["a<|endoftext|>b"])[0]
    given = load_tokenizer(bpe.file)  # one that is given keeps the usual meaning
    assert given.encode("<|endoftext|>") == [bpe.eos]
    assert given.fingerprint != bpe.fingerprint


@pytest.mark.fast
def test_bpe_is_trained_once_on_training_documents(tmp_path, monkeypatch):
    held_out = split_documents(20, 0.2, seed=0).validation
    documents = ["zzzzzzzz" if number in held_out else f"{word}" for number, word in enumerate(WORDS)]
    options = {"validation": 0.2, "seed": 0, "cache_dir": tmp_path}
    first = open_tokenizer("bpe:300", corpus(documents), **options)
    assert len(first.encode("zzzzzzzz")) == 8  # nothing learned from what was held out
    monkeypatch.setattr(tokens, "train_bpe", None)  # a second training would call it
    again = open_tokenizer("bpe:300", corpus(documents), **options)
    assert again.fingerprint == first.fingerprint


@pytest.mark.fast
def test_training_text_is_spread_over_a_large_corpus(monkeypatch):
    monkeypatch.setattr(tokens, "TRAINING_CHARACTERS", 100)
    documents = [f"{number:010d}" for number in range(100)]  # 1,000 characters, every 10th document
    sample = list(tokens._training_text(corpus(documents), validation=0, seed=0))
    assert sample == documents[::10]


@pytest.mark.fast
def test_load_directory_and_end_token(bpe, tmp_path):
    (tmp_path / "tokenizer.json").write_text(bpe.file.read_text())
    assert load_tokenizer(tmp_path).eos == load_tokenizer(tmp_path / "tokenizer.json").eos == bpe.eos
    assert load_tokenizer(tmp_path).fingerprint == load_tokenizer(bpe.file).fingerprint
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "A"}}))
    other = load_tokenizer(tmp_path)
    assert other.eos == other.encode("A")[0]
    assert other.fingerprint != load_tokenizer(bpe.file).fingerprint
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<none>"}))
    with pytest.raises(UserError, match="no end-of-document token: looked for <none>"):
        load_tokenizer(tmp_path)
    for broken in (b"{", b"[]", b"\xff", b"[" * 100_000, b'{"eos_token": 5}', b'{"eos_token": {"content": [1]}}'):
        (tmp_path / "tokenizer_config.json").write_bytes(broken)
        with pytest.raises(UserError, match=r"tokenizer_config.json"):
            load_tokenizer(tmp_path)


def test_a_transformers_directory(bpe, tmp_path):
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(bpe.file), eos_token="<|endoftext|>")
    fast.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos == fast.eos_token_id
    assert tokenizer.encode("the cat") == fast.encode("the cat", add_special_tokens=False)


@pytest.mark.fast
@pytest.mark.parametrize("spec", ["bpe:", "bpe:many", "bpe:256", "bpe:-300", "bpe:1048577", f"bpe:{10**20}"])
def test_bad_bpe_size(spec, tmp_path):
    with pytest.raises(UserError, match="at least 257"):
        open_tokenizer(spec, corpus(), validation=0, seed=0, cache_dir=tmp_path)


@pytest.mark.fast
def test_refuses(tmp_path):
    options = {"validation": 0, "seed": 0, "cache_dir": tmp_path}
    with pytest.raises(UserError, match="tokenizer: there is none at"):
        open_tokenizer(tmp_path / "none", corpus(), **options)
    with pytest.raises(UserError, match="tokenizer is a int"):
        open_tokenizer(3, corpus(), **options)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"is not a tokenizer\.json"):
        open_tokenizer(tmp_path, corpus(), **options)
    tokenised = Corpus("ids", "fingerprint", lambda: iter([]), tokenised=True)
    with pytest.raises(UserError, match="tokenised already"):
        open_tokenizer("bpe:300", tokenised, **options)


def test_a_saved_tokenizer_gives_the_same_ids_here_and_in_transformers(bpe, tmp_path):
    """Also of the text that spells the end of a document, which is no end there; and what was loaded from it is saved
    alike."""
    transformers = pytest.importorskip("transformers")
    text = "def read(self):\n\t# \u00e9\u20ac \U0001f41f \x00<|endoftext|> end  "
    for number, each in enumerate((bpe, ByteTokenizer())):
        directory = tmp_path / str(number)
        assert save_tokenizer(each, directory)
        again = load_tokenizer(directory)
        assert again.encode(text) == each.encode(text) and again.decode(each.encode(text)) == text
        assert (again.vocab_size, again.eos) == (each.vocab_size, each.eos)
        theirs = transformers.AutoTokenizer.from_pretrained(directory)
        plain = text.replace("<|endoftext|>", "")
        assert (
            theirs.encode(plain, add_special_tokens=False) == each.encode(plain)
            and theirs.decode(each.encode(plain)) == plain
        )
        assert theirs.eos_token_id == each.eos
        files = {path.name: path.read_bytes() for path in directory.iterdir()}
        assert (
            save_tokenizer(again, directory) and {path.name: path.read_bytes() for path in directory.iterdir()} == files
        )
        if each is bpe:
            assert again.fingerprint == each.fingerprint
