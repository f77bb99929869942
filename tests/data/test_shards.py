"""Tokenised once, found again, damage found."""

import multiprocessing
import pickle
import time
from pathlib import Path

import numpy as np
import pytest

from shoal.data import ByteTokenizer, Corpus, build_shards, damaged_files, open_shards, shards
from shoal.data.shards import Shards
from shoal.errors import UserError

TEXTS = ["one", "zwölf", "3"]
EOS = 256


def corpus(texts=TEXTS, fingerprint="fingerprint") -> Corpus:
    return Corpus("texts", fingerprint, lambda: iter(texts))


def no_corpus() -> Corpus:
    """The same source, but reading it is an error."""
    return Corpus("texts", "fingerprint", lambda: pytest.fail("tokenised a second time"))


def contents(opened: Shards) -> list[list[int]]:
    return [
        opened.read(start, stop).tolist() for start, stop in zip(opened.offsets[:-1], opened.offsets[1:], strict=True)
    ]


EXPECTED = [[*text.encode(), EOS] for text in TEXTS]


@pytest.mark.fast
def test_documents_come_back_with_their_end(tmp_path):
    opened = build_shards(corpus(), ByteTokenizer(), tmp_path)
    assert contents(opened) == EXPECTED
    assert opened.offsets.tolist() == [0, 4, 11, 13]
    assert (opened.index.documents, opened.index.tokens, opened.index.dtype) == (3, 13, "uint16")
    assert damaged_files(opened.directory) == []


@pytest.mark.fast
def test_second_time_nothing_is_read(tmp_path):
    build_shards(corpus(), ByteTokenizer(), tmp_path)
    (lock,) = tmp_path.rglob("*.lock")
    lock.unlink()
    assert contents(build_shards(no_corpus(), ByteTokenizer(), tmp_path)) == EXPECTED
    assert not lock.exists()  # nor is anything written: the cache may be read-only by then


@pytest.mark.fast
def test_another_source_or_tokenizer_has_shards_of_its_own(tmp_path):
    directories = {
        build_shards(corpus(), ByteTokenizer(), tmp_path).directory,
        build_shards(corpus(fingerprint="changed"), ByteTokenizer(), tmp_path).directory,
        build_shards(corpus(), ByteTokenizer(fingerprint="other"), tmp_path).directory,
    }
    assert len(directories) == 3


@pytest.mark.fast
def test_several_shards_and_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_TOKENS", 10)
    monkeypatch.setattr(shards, "ENCODE_CHARACTERS", 4)
    texts = ["abcdefgh" * (1 + number % 3) for number in range(12)]
    opened = build_shards(corpus(texts), ByteTokenizer(), tmp_path)
    assert len(opened.maps) == 8  # of 9, 17, 25 tokens, ...: 9 do not close a shard, so each third document shares one
    assert contents(opened) == [[*text.encode(), EOS] for text in texts]


@pytest.mark.fast
def test_large_vocabulary_and_tokenised_documents(tmp_path):
    big = ByteTokenizer(vocab_size=70_000, eos=69_999, fingerprint="big")
    documents = [np.array([1, 2, 65_600]), np.array([7, 69_999])]  # the second has its end already
    opened = build_shards(Corpus("ids", "fingerprint", lambda: iter(documents), tokenised=True), big, tmp_path)
    assert opened.index.dtype == "uint32"
    assert contents(opened) == [[1, 2, 65_600, 69_999], [7, 69_999]]


@pytest.mark.fast
@pytest.mark.parametrize("bad", [[5, 257], [-1, 5]])
def test_ids_of_another_tokenizer(tmp_path, bad):
    source = Corpus("ids", "fingerprint", lambda: iter([np.array(bad)]), tokenised=True)
    with pytest.raises(UserError, match=f"token ids from {bad[0]} to {bad[1]}, but the tokenizer's run from 0 to 256"):
        build_shards(source, ByteTokenizer(), tmp_path)


@pytest.mark.fast
def test_empty_corpus(tmp_path):
    with pytest.raises(UserError, match="texts has no documents"):
        build_shards(corpus([]), ByteTokenizer(), tmp_path)
    assert contents(build_shards(corpus(), ByteTokenizer(), tmp_path)) == EXPECTED  # nothing of the failure is left


def cut_shard(directory: Path) -> str:
    (directory / "shard-00000.bin").write_bytes(b"12")
    return "shard-00000.bin"


def lose_offsets(directory: Path) -> str:
    (directory / "offsets.bin").unlink()
    return "offsets.bin"


def garble_index(directory: Path) -> str:
    (directory / "index.json").write_text("{")
    return "index.json"


@pytest.mark.fast
@pytest.mark.parametrize("damage", [cut_shard, lose_offsets, garble_index])
def test_a_damaged_file_is_named_and_built_again(tmp_path, damage):
    directory = build_shards(corpus(), ByteTokenizer(), tmp_path).directory
    name = damage(directory)
    assert damaged_files(directory) == [name]
    with pytest.raises(UserError, match=f"damaged: {name}"):
        open_shards(directory)
    assert contents(build_shards(corpus(), ByteTokenizer(), tmp_path)) == EXPECTED


@pytest.mark.fast
def test_a_flipped_bit_is_found_by_checksum(tmp_path):
    directory = build_shards(corpus(), ByteTokenizer(), tmp_path).directory
    shard = directory / "shard-00000.bin"
    flipped = bytearray(shard.read_bytes())
    flipped[4] ^= 1
    shard.write_bytes(flipped)
    assert damaged_files(directory) == ["shard-00000.bin"]


@pytest.mark.fast
def test_a_build_that_was_killed_leaves_no_trace(tmp_path):
    directory = build_shards(corpus(), ByteTokenizer(), tmp_path / "other").directory
    unfinished = tmp_path / "tokens" / (directory.name + ".tmp")
    unfinished.mkdir(parents=True)
    (unfinished / "shard-00007.bin").write_bytes(b"half")
    opened = build_shards(corpus(), ByteTokenizer(), tmp_path)
    assert contents(opened) == EXPECTED
    assert sorted(path.name for path in opened.directory.iterdir()) == ["index.json", "offsets.bin", "shard-00000.bin"]


@pytest.mark.fast
def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written.*cache_dir"):
        build_shards(corpus(), ByteTokenizer(), tmp_path / "file")


@pytest.mark.fast
def test_pickle_holds_the_place_not_the_tokens(tmp_path):
    opened = build_shards(corpus(["x" * 10_000]), ByteTokenizer(), tmp_path)
    pickled = pickle.dumps(opened)
    assert len(pickled) < 1000
    assert contents(pickle.loads(pickled)) == contents(opened)


def build_slowly(cache: Path) -> None:
    def stream():
        with open(cache / "builds", "a") as file:
            file.write("built\n")
        time.sleep(0.3)
        yield from TEXTS

    assert contents(build_shards(Corpus("texts", "fingerprint", stream), ByteTokenizer(), cache)) == EXPECTED


def test_of_many_processes_one_builds(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=build_slowly, args=(tmp_path,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "builds").read_text() == "built\n"
