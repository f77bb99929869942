from dataclasses import replace

import pytest
import torch

from shoal.errors import UserError
from shoal.models import Bert, BertConfig, MaskedTokens

SMALL = BertConfig(vocab_size=61, sequence=32, layers=2, d_model=32, heads=4)


def model_of(cfg):
    model = Bert(cfg)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def test_equals_bert_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
    )
    theirs = transformers.BertForMaskedLM(config).double().eval()
    ours = model_of(SMALL)
    weights = theirs.state_dict()
    copy = {
        "token_embedding.weight": weights["bert.embeddings.word_embeddings.weight"],
        # The segment of every token is 0.
        "position_embedding.weight": weights["bert.embeddings.position_embeddings.weight"]
        + weights["bert.embeddings.token_type_embeddings.weight"][0],
    }
    for kind in ("weight", "bias"):
        copy[f"embedding_norm.{kind}"] = weights[f"bert.embeddings.LayerNorm.{kind}"]
        copy[f"head.transform.{kind}"] = weights[f"cls.predictions.transform.dense.{kind}"]
        copy[f"head.norm.{kind}"] = weights[f"cls.predictions.transform.LayerNorm.{kind}"]
        copy[f"head.decoder.{kind}"] = weights[f"cls.predictions.decoder.{kind}"]
        for index in range(2):
            old, new = f"bert.encoder.layer.{index}", f"blocks.{index}"
            qkv = [weights[f"{old}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
            copy[f"{new}.attention.qkv.{kind}"] = torch.cat(qkv)
            copy[f"{new}.attention.out.{kind}"] = weights[f"{old}.attention.output.dense.{kind}"]
            copy[f"{new}.attention_norm.{kind}"] = weights[f"{old}.attention.output.LayerNorm.{kind}"]
            copy[f"{new}.up.{kind}"] = weights[f"{old}.intermediate.dense.{kind}"]
            copy[f"{new}.down.{kind}"] = weights[f"{old}.output.dense.{kind}"]
            copy[f"{new}.mlp_norm.{kind}"] = weights[f"{old}.output.LayerNorm.{kind}"]
    ours.load_state_dict(copy)
    ids = torch.randint(0, 61, (2, 9))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-12)


@pytest.mark.fast
@pytest.mark.parametrize("pre_norm", [False, True])
def test_a_token_sees_both_ways_within_its_document(pre_norm):
    model = model_of(replace(SMALL, pre_norm=pre_norm))
    ids = torch.randint(0, 61, (1, 8))
    other = ids.clone()
    other[:, 2] = (other[:, 2] + 1) % 61
    assert (model(ids) != model(other)).any(-1).all()
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])
    changed = (model(ids, document_ids=documents) != model(other, document_ids=documents)).any(-1)
    assert changed.tolist() == [[True] * 5 + [False] * 3]


@pytest.mark.fast
def test_meta_ties_and_errors():
    with torch.device("meta"):
        base = Bert(BertConfig(vocab_size=30522))
    assert base.head.decoder.weight is base.token_embedding.weight
    # BERT-base for masked tokens has 109,514,298 parameters; ours lacks the two segment embeddings.
    assert sum(parameter.numel() for parameter in base.parameters()) == 109_514_298 - 2 * 768
    with pytest.raises(UserError, match="a row of 33 tokens"):
        Bert(SMALL)(torch.zeros(1, 33, dtype=torch.long))


@pytest.mark.fast
def test_masking_hides_a_share_and_is_a_function_of_the_index():
    ids = torch.arange(20_000) % 50
    labels = ids.roll(-1).clone()
    labels[-1000:] = -100
    rows = [{"input_ids": ids, "labels": labels, "document_ids": ids}] * 2
    masked = MaskedTokens(rows, vocab_size=61, mask_id=60)
    row = masked[0]
    chosen = row["labels"] != -100
    assert len(masked) == 2
    assert chosen[:19_000].float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert not chosen[19_000:].any()
    assert torch.equal(row["labels"][chosen], ids[chosen])
    assert torch.equal(row["input_ids"][~chosen], ids[~chosen])
    shown = row["input_ids"][chosen]
    assert (shown == 60).float().mean().item() == pytest.approx(0.8 + 0.1 / 61, abs=0.03)
    assert (shown == ids[chosen]).float().mean().item() == pytest.approx(0.1 + 0.1 / 61, abs=0.03)
    assert torch.equal(masked[0]["input_ids"], row["input_ids"])
    assert not torch.equal(masked[1]["input_ids"], row["input_ids"])
