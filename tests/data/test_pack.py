"""Rows out of documents: worked by hand, and every token a label once."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import ByteTokenizer, Corpus, PackedText, build_shards, shards
from shoal.errors import UserError

E = 256


def packed(texts: list[str], cache: Path, chosen: list[int] | None = None, **options) -> PackedText:
    opened = build_shards(Corpus("texts", "fingerprint", lambda: iter(texts)), ByteTokenizer(), cache)
    documents = np.arange(len(texts)) if chosen is None else np.array(chosen)
    return PackedText(opened, documents, eos=E, **options)


def show(values: torch.Tensor) -> str:
    """E for the end of a document, . for an ignored label."""
    assert values.dtype == torch.int64
    return "".join({E: "E", -100: "."}.get(v) or chr(v) for v in values.tolist())


# documents "ab", "c", "def" make the stream a b E c E d e f E
ROWS = [
    # sequence, row, inputs, labels, labels within documents, document ids, positions
    (4, 0, "abEc", "bEcE", "bE.E", [0, 0, 0, 1], [0, 1, 2, 0]),
    (4, 1, "Edef", "defE", ".efE", [0, 1, 1, 1], [0, 0, 1, 2]),
    (3, 1, "cEd", "Ede", "E.e", [0, 0, 1], [0, 1, 0]),
    (3, 2, "efE", "fE.", "fE.", [0, 0, 0], [0, 1, 2]),
    (5, 1, "defEE", "efE..", "efE..", [0, 0, 0, 0, 1], [0, 1, 2, 3, 0]),
    (8, 0, "abEcEdef", "bEcEdefE", "bE.E.efE", [0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 2, 0, 1, 0, 1, 2]),
    (10, 0, "abEcEdefEE", "bEcEdefE..", "bE.E.efE..", [0, 0, 0, 1, 1, 2, 2, 2, 2, 3], [0, 1, 2, 0, 1, 0, 1, 2, 3, 0]),
]
NUMBER_OF_ROWS = {3: 3, 4: 2, 5: 2, 8: 1, 10: 1}


@pytest.mark.fast
@pytest.mark.parametrize(("sequence", "row", "inputs", "labels", "within", "ids", "positions"), ROWS)
def test_rows_by_hand(tmp_path, sequence, row, inputs, labels, within, ids, positions):
    texts = ["ab", "c", "def"]
    by_row = packed(texts, tmp_path, sequence=sequence)
    assert len(by_row) == NUMBER_OF_ROWS[sequence]
    assert by_row[row].keys() == {"input_ids", "labels"}
    assert (show(by_row[row]["input_ids"]), show(by_row[row]["labels"])) == (inputs, labels)
    sample = packed(texts, tmp_path, sequence=sequence, attend="document")[row]
    assert (show(sample["input_ids"]), show(sample["labels"])) == (inputs, within)
    assert sample["document_ids"].tolist() == ids
    assert sample["position_ids"].tolist() == positions


@pytest.mark.fast
def test_chosen_documents_only(tmp_path):
    rows = packed(["ab", "c", "def", "gh"], tmp_path, chosen=[0, 2], sequence=6)
    assert (len(rows), show(rows[0]["input_ids"]), show(rows[0]["labels"])) == (1, "abEdef", "bEdefE")


@pytest.mark.fast
@settings(max_examples=40, deadline=None)
@given(data=st.data(), sequence=st.integers(1, 12))
def test_every_token_is_a_label_once(data, sequence):
    texts = data.draw(st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=8))
    chosen = sorted(data.draw(st.sets(st.integers(0, len(texts) - 1), min_size=1)))
    stream = [token for number in chosen for token in [*texts[number].encode(), E]]
    firsts = set(np.cumsum([0] + [len(texts[number]) + 1 for number in chosen[:-1]]).tolist())
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_TOKENS", 10)
        by_row = packed(texts, Path(cache), chosen, sequence=sequence)
        by_document = packed(texts, Path(cache), chosen, sequence=sequence, attend="document")
    labels, within = [
        torch.cat([rows[i]["labels"] for i in range(len(rows))]).tolist() for rows in (by_row, by_document)
    ]
    filling = [-100] * (len(labels) - len(stream) + 1)
    assert len(filling) < sequence
    assert labels == stream[1:] + filling
    assert within == [-100 if at in firsts else token for at, token in enumerate(stream)][1:] + filling


@pytest.mark.fast
def test_a_sample_may_be_changed(tmp_path):
    rows = packed(["abcdef"], tmp_path, sequence=3)
    rows[0]["input_ids"].zero_()
    assert show(rows[0]["input_ids"]) == "abc"


@pytest.mark.fast
def test_refuses(tmp_path):
    with pytest.raises(UserError, match="sequence is 0"):
        packed(["ab"], tmp_path, sequence=0)
    with pytest.raises(UserError, match="attend is 'all'"):
        packed(["ab"], tmp_path, sequence=2, attend="all")
    with pytest.raises(UserError, match=r"0 token\(s\) make no row"):
        packed(["ab"], tmp_path, chosen=np.array([], dtype=np.int64), sequence=2)
    for row in (-1, 1):
        with pytest.raises(IndexError):
            packed(["ab"], tmp_path, sequence=2)[row]
