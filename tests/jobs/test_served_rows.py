"""A job whose embeddings lie on parameter servers by rows: what it computes is what one process computes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.checkpoint.pieces import Want
from shoal.checkpoint.reader import load, tensor_shapes
from shoal.errors import UserError
from shoal.jobs.choose import Sizes, settle
from shoal.jobs.evaluator import follow as evaluate_checkpoints
from shoal.jobs.read import parse_job
from shoal.jobs.served.tables import tables_of
from shoal.jobs.served.worker import _Worker
from shoal.jobs.train import train
from shoal.models.registry import BUILDERS, ModelSpec
from shoal.report.evaluations import read_evaluations
from shoal.report.metrics import read_metrics
from tests.jobs.test_served import SECRET, run, tables

pytestmark = pytest.mark.usefixtures("quick")
LLAMA = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
    "pad_token_id": 32,
}
TABLE = "model.embed_tokens.weight"
ROWS = {"optimizer": "adagrad", "lr": 0.05, "weight_decay": 0.0, "global_batch": 8, "steps": 4}


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("SHOAL_SECRET", SECRET)


@pytest.fixture
def llama(corpus):
    """A Llama of transformers, whose embedding is named as a table."""
    return {
        "model": {"name": "hf", "config": LLAMA},
        "data": {"source": str(corpus), "sequence": 16, "validation": 0.2},
        "server": {"policy": "sync", "tables": [TABLE]},
    }


class TextClassificationModel(nn.Module):
    """The model of PyTorch's tutorial "Text classification with the torchtext library"."""

    def __init__(self, vocab_size, embed_dim, num_class):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocab_size, embed_dim, sparse=True)
        self.fc = nn.Linear(embed_dim, num_class)
        self.init_weights()

    def init_weights(self):
        initrange = 0.5
        self.embedding.weight.data.uniform_(-initrange, initrange)
        self.fc.weight.data.uniform_(-initrange, initrange)
        self.fc.bias.data.zero_()

    def forward(self, text, offsets):
        embedded = self.embedding(text, offsets)
        return self.fc(embedded)


def classified(model: nn.Module, mb: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    text = mb["input_ids"]
    logits = model(text.flatten(), torch.arange(0, text.numel(), text.shape[1]))
    return F.cross_entropy(logits, mb["labels"][:, 0] % 4, reduction="sum"), torch.tensor(len(text))


@pytest.fixture
def bags(corpus, monkeypatch):
    """The tutorial's model, of whose embedding bag gradients are sparse."""

    def build(settings):
        return ModelSpec("bags", partial(TextClassificationModel, 257, 16, 4), classified, {}, 257)

    monkeypatch.setitem(BUILDERS, "bags", build)
    return {
        "model": {"name": "bags"},
        "data": {"source": str(corpus), "sequence": 16, "validation": 0.2},
        "server": {"policy": "sync"},
    }


def alone(run_dir, of, **some):
    """Trains in one process."""
    job, origins = parse_job({**tables(run_dir, **some), **of})
    train(job, origins)
    return read_metrics(run_dir / "metrics.jsonl")


def everything(path) -> dict[str, Tensor]:
    """All that is in a checkpoint."""
    into = {name: torch.zeros(shape) for name, shape in tensor_shapes(path).items()}
    load(path, [Want.whole(name, each) for name, each in into.items()])
    return into


def same(one, other, exactly: bool) -> None:
    """Checks two checkpoints: weights and the optimizer's state."""
    mine, theirs = everything(one), everything(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        if exactly:
            assert torch.equal(theirs[name], value), name
        torch.testing.assert_close(theirs[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "model, ps, workers",
    [
        ("llama", 2, 2),
        ("bags", 1, 1),
        pytest.param("llama", 1, 1, marks=pytest.mark.matrix),
        pytest.param("bags", 2, 2, marks=pytest.mark.matrix),
    ],
)
def test_rows_train_to_the_bit_as_one_process(request, tmp_path, model, ps, workers):
    """Of shares whose counts are powers of two, where factors round nothing. One process adds the sparse gradients of
    two microbatches sample by sample, workers add their own first."""
    of, some = request.getfixturevalue(model), {**ROWS, "clip": 0.0}
    expected = alone(tmp_path / "alone", of, **some, microbatch=8 // workers)
    found = run(tmp_path / "served", workers, "sync", of, ps, **some)
    exactly = model == "llama" or workers == 1
    for mine, theirs in zip(found.steps, expected.steps, strict=True):
        assert mine.loss == theirs.loss if exactly else mine.loss == pytest.approx(theirs.loss, rel=1e-6)
    assert found.evals[-1].loss == pytest.approx(expected.evals[-1].loss, rel=1e-5)
    assert sum(found.servers[-1].servers) == expected.run.parameters and len(found.servers[-1].servers) == ps
    same(tmp_path / "alone/checkpoints/step-00000004", tmp_path / "served/checkpoints/step-00000004", exactly)


def test_a_worker_has_not_the_table(llama, tmp_path):
    job, origins = parse_job({**tables(tmp_path, **ROWS), **llama})
    settled = settle(job, origins, Sizes(1, 1))
    worker = _Worker(settled, 1, None)
    held = {slot.name for chunk in worker.engine.parts.chunks for slot in chunk.slots}
    assert TABLE not in held and "lm_head.weight" in held
    assert not any(isinstance(each, nn.Embedding) for each in worker.engine.module.modules())
    worker.engine.close()


@pytest.mark.matrix
def test_rows_are_clipped_by_the_norm_of_all_and_any_number_of_servers_goes_on(llama, tmp_path):
    """Resumed by ranks too, and by servers from the checkpoint of ranks."""
    some = {**ROWS, "optimizer": "sgd", "clip": 0.05, "precision": "bf16"}
    expected = alone(tmp_path / "alone", llama, **some)
    one = run(tmp_path / "one", 2, "sync", llama, 1, **some)
    two = run(tmp_path / "two", 2, "sync", llama, 2, **some)
    assert [(each.loss, each.grad_norm) for each in one.steps] == [(each.loss, each.grad_norm) for each in two.steps]
    for mine, theirs in zip(one.steps, expected.steps, strict=True):
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=2e-2) and mine.grad_norm > 0.05
    saved = [tmp_path / each / "checkpoints/step-00000004" for each in ("one", "two")]
    same(*saved, True)
    for steps, ps in ((5, 3), (6, 1)):
        assert run(tmp_path / "two", 2, "sync", llama, ps, **{**some, "steps": steps}).resumed[-1] == steps - 1
    alone(tmp_path / "two", llama, **{**some, "steps": 7})
    assert run(tmp_path / "two", 1, "sync", llama, 2, **{**some, "steps": 8}).resumed[-1] == 7
    alone(tmp_path / "one", llama, **{**some, "steps": 8})
    mine, theirs = (everything(tmp_path / each / "checkpoints/step-00000008") for each in ("one", "two"))
    for name, value in mine.items():
        torch.testing.assert_close(theirs[name], value, rtol=5e-2, atol=5e-3)


def test_other_policies_and_the_evaluator(bags, tmp_path):
    """Rows are pulled at the version that counts, or a newer one, and every sample is trained on once."""
    bags = {**bags, "server": {"policy": "staleness:1"}}
    found = run(tmp_path, 2, "", bags, 2, **{**ROWS, "steps": 12})
    assert [each.step for each in found.steps] == list(range(1, 13))
    assert found.servers[-1].pushes - found.servers[-1].dropped == 12
    job, origins = parse_job({**tables(tmp_path, **{**ROWS, "steps": 12}), **bags})
    evaluate_checkpoints(job, origins)
    (last,) = [each for each in read_evaluations(tmp_path) if each.step == 12]
    assert last.loss == pytest.approx(found.evals[-1].loss, rel=1e-4)


@pytest.mark.parametrize(
    "section, key, value, message",
    [
        ("train", "optimizer", "adamw", r'Give train.optimizer = "adagrad" or "sgd" without momentum'),
        ("train", "weight_decay", 0.1, r"Give train.weight_decay = 0; or server.tables = \[\]"),
        ("train", "precision", "fp16", 'a gradient of rows that overflows.*Give "bf16" or "fp32"'),
        ("server", "tables", ["model.embed_tokens"], "'model.embed_tokens' is no weight of an embedding"),
        ("model", "config", {**LLAMA, "tie_word_embeddings": True}, "it is tied to the weight of a Linear"),
    ],
)
def test_what_does_not_go_with_rows_is_refused(llama, tmp_path, section, key, value, message):
    content = {**tables(tmp_path, **ROWS), **llama}
    content[section] = {**content[section], key: value}
    with pytest.raises(UserError, match=message):
        tables_of(settle(*parse_job(content), Sizes(1, 1)))


def test_remedies_that_are_named_work(llama, tmp_path):
    content = {**tables(tmp_path, **{**ROWS, "optimizer": "adamw"}), **llama}
    content["server"] = {"policy": "sync", "tables": []}
    assert not tables_of(settle(*parse_job(content), Sizes(1, 1))).names
    content = {**tables(tmp_path, **{**ROWS, "optimizer": "sgd", "precision": "bf16"}), **llama}
    settled = settle(*parse_job(content), Sizes(1, 1))
    assert tables_of(settled).names == {TABLE}
    only = replace(settled, model=replace(settled.model, factory=partial(nn.EmbeddingBag, 4, 2, sparse=True)))
    with pytest.raises(UserError, match="all that is trained would be served by rows"):
        tables_of(replace(only, job=replace(only.job, server=replace(only.job.server, tables=None))))
