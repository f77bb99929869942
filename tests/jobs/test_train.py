"""The main road on one process: what a run leaves, how it goes on, and what does not end it."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from shoal import checkpoint
from shoal.comm import World
from shoal.elastic.control import JOB
from shoal.errors import CheckpointError, TrainingError, UserError
from shoal.jobs import record
from shoal.jobs.__main__ import told
from shoal.jobs.changes import changes
from shoal.jobs.choose import Sizes, settle
from shoal.jobs.config import Job
from shoal.jobs.export import evaluate_run, export_checkpoint, generate_text
from shoal.jobs.read import load_job
from shoal.jobs.train import train
from shoal.optim.lr import _cosine
from shoal.training.result import StepResult
from tests.jobs.conftest import losses_of, records_of
from tests.jobs.logs import fill_at

pytestmark = pytest.mark.fast


def kinds(run_dir: str) -> list[str]:
    return [json.loads(line)["kind"] for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_its_directory_complete(make_job, alone, capsys):
    job = make_job(
        run={"sample": "3 + ", "eval_every": 3, "save_every": 2, "norms_every": 4, "trackers": ["tensorboard"]}
    )
    outcome = train(job, {"train.steps": "file"}, alone)
    run_dir = Path(job.run.dir)
    assert (outcome.step, outcome.reason, outcome.signal) == (6, "all 6 steps were trained", None)
    assert outcome.report == run_dir / "report.html"
    assert outcome.report.stat().st_size > 10_000
    assert list((run_dir / "events").iterdir())
    assert [row.step for row in checkpoint.listing(run_dir / "checkpoints")] == [6, 4, 2]
    records = records_of(job)
    assert [each.step for each in records.steps] == [1, 2, 3, 4, 5, 6]
    assert [each.step for each in records.steps if each.norms] == [4]
    assert records.steps[3].norms.keys() == {"token_embedding", "position_embedding", "blocks.0", "norm"}
    assert math.hypot(*records.steps[3].norms.values()) == pytest.approx(records.steps[3].grad_norm, rel=1e-5)
    assert "Gradient by layer" in outcome.report.read_text()
    assert [each.step for each in records.evals] == [0, 3, 6]
    assert [each.step for each in records.samples] == [3, 6]
    assert [each.step for each in records.checkpoints] == [2, 4, 6]
    assert records.evals[-1].loss < records.evals[0].loss - 0.3
    assert all(each.mfu is not None and each.mfu > 0 for each in records.steps)
    assert records.run is not None and records.run.config["train.steps"] == {"value": 6, "origin": "file"}
    assert records.run.config["model.vocab_size"] == {"value": 257, "origin": "planner"}
    assert records.end is not None and not records.warnings
    assert {json.loads(line)["step"] for line in (run_dir / "timeline.jsonl").read_text().splitlines()} == {3, 4, 5, 6}
    assert "vocab_size" in capsys.readouterr().out


def test_the_resolved_job_trains_the_same(quick, make_job, alone, tmp_path):
    job = make_job(optimizer={"name": "sgd", "momentum": 0.9})
    train(job, {}, alone)
    again, origins = load_job(Path(job.run.dir) / "resolved.toml", [f"run.dir={tmp_path / 'again'}"])
    train(again, origins, World.single("cpu"))
    assert losses_of(again) == losses_of(job)


def test_a_run_goes_on_where_it_stopped(quick, make_job, alone, tmp_path):
    whole = make_job()
    train(whole, {}, alone)
    half = make_job(steps=3, run={"dir": str(tmp_path / "half")})
    train(half, {}, World.single("cpu"))
    rest = make_job(run={"dir": str(tmp_path / "half")})
    train(rest, {}, World.single("cpu"))
    assert losses_of(rest) == losses_of(whole)
    assert records_of(rest).attempts == 2

    finished = train(rest, {}, World.single("cpu"))
    assert finished.reason == "step 6 of 6 was reached before: there is nothing left to train"

    elsewhere = make_job(steps=8, run={"dir": str(tmp_path / "other"), "resume": str(tmp_path / "half")})
    train(elsewhere, {}, World.single("cpu"))
    assert [each.step for each in records_of(elsewhere).steps] == [7, 8]


def test_who_goes_back_where_nodes_come_and_go_leaves_no_later_checkpoints(
    quick, make_job, alone, tmp_path, monkeypatch
):
    """From which the ranks would go on after a failure; elsewhere that is said."""
    train(make_job(run={"save_every": 2}), {}, alone)
    back = {"resume": str(tmp_path / "run/checkpoints/step-00000002")}
    monkeypatch.setenv(JOB, "a job")
    with pytest.raises(UserError, match=r"run.resume = .*: delete \S*step-00000006, \S*step-00000004, or give another"):
        train(make_job(run=back), {}, World.single("cpu"))
    elsewhere = make_job(run={**back, "dir": str(tmp_path / "other")})
    train(elsewhere, {}, World.single("cpu"))
    assert [each.step for each in records_of(elsewhere).steps] == [3, 4, 5, 6] and not records_of(elsewhere).warnings
    monkeypatch.delenv(JOB)
    train(make_job(steps=3, run=back), {}, World.single("cpu"))
    (warning,) = records_of(make_job()).warnings
    assert re.search(r'"auto" goes on from the newest: delete \S*step-00000006, \S*step-00000004 to', warning.message)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(quick, make_job, alone, tmp_path):
    whole = make_job(run={"dir": str(tmp_path / "whole")})
    train(whole, {}, alone)
    train(make_job(steps=4, run={"save_every": 2}), {}, World.single("cpu"))
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    victim = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-7])
    job = make_job()
    train(job, {}, World.single("cpu"))
    assert losses_of(job) == losses_of(whole)
    (warning,) = records_of(job).warnings
    assert "checkpoint step-00000004 is passed over" in warning.message
    assert victim.name in warning.message


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")])
def test_a_signal_ends_the_run_after_a_step_with_a_checkpoint_and_a_report(
    quick, make_job, alone, monkeypatch, number, name
):
    before = signal.getsignal(number)
    taken = record.Recorder.step

    def step(self, result, samples):
        taken(self, result, samples)
        if result.step == 2:
            for _ in range(2 if number == signal.SIGTERM else 1):  # Slurm repeats it
                os.kill(os.getpid(), number)

    monkeypatch.setattr(record.Recorder, "step", step)
    job = make_job(steps=100_000)
    outcome = train(job, {}, alone)
    assert outcome.reason == f"stopped by {name}"
    assert outcome.signal == number
    assert 3 <= outcome.step < 1000
    assert outcome.report is not None and outcome.report.exists()
    assert [row.step for row in checkpoint.listing(Path(job.run.dir) / "checkpoints")] == [outcome.step]
    assert signal.getsignal(number) is before


def test_time_is_a_limit_that_counts_over_attempts(quick, make_job, alone):
    job = make_job(steps=100_000, seconds=0.5)
    first = train(job, {}, alone)
    assert first.reason == "the time limit was reached"
    second = train(job, {}, World.single("cpu"))
    assert second.step == first.step and "the time limit was reached before" in second.reason


def test_epochs_are_a_limit_too(quick, make_job, alone):
    job = make_job(steps=None, epochs=2, global_batch=64, microbatch=8)
    outcome = train(job, {}, alone)
    per_epoch = outcome.step // 2
    assert outcome.step == 2 * per_epoch
    assert [each.epoch for each in records_of(job).steps] == [0] * per_epoch + [1] * per_epoch


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(quick, make_job, alone, monkeypatch):
    written = checkpoint.save.dcp.write_pieces

    def full(path, rank, pieces):
        if path.name.startswith("step-00000002"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(path, rank, pieces)

    monkeypatch.setattr(checkpoint.save.dcp, "write_pieces", full)
    job = make_job(run={"save_every": 2})
    assert train(job, {}, alone).step == 6
    (warning,) = records_of(job).warnings
    assert "checkpoint of step 2" in warning.message and "No space left" in warning.message
    assert [row.step for row in checkpoint.listing(Path(job.run.dir) / "checkpoints")] == [6, 4]
    assert [each.step for each in records_of(job).checkpoints] == [4, 6]


def test_a_log_that_cannot_be_written_does_not_end_the_run(quick, make_job, alone, monkeypatch, capsys):
    fill_at(3, monkeypatch)
    job = make_job()
    assert train(job, {}, alone).step == 6
    assert len(losses_of(job)) == 2
    assert capsys.readouterr().out.count("metrics.jsonl cannot be written any more") == 1


def test_a_loss_that_is_not_finite_names_step_and_parameter_and_leaves_a_report(make_job, alone):
    job = make_job(lr=1e30, clip=0.0, optimizer="sgd", weight_decay=0.0)
    with pytest.raises(TrainingError, match=r"the (loss|gradient norm) is (nan|inf).*first parameter") as error:
        train(job, {}, alone)
    end, last = records_of(job).end, records_of(job).steps[-1].step
    assert str(error.value).startswith(f"step {last + 1}: "), "the log counts from 1"
    assert end is not None and end.reason == f"failed: {error.value}"
    assert (Path(job.run.dir) / "report.html").exists()


@pytest.mark.parametrize(("power", "least", "most"), [(22, 1, 5), (200, 6, 6)])
def test_steps_that_the_loss_scale_skips_are_not_trained(quick, make_job, alone, power, least, most):
    """A few are, which is usual; where all are, code 0 would say that something was trained."""
    job = make_job(precision={"name": "fp16", "initial_scale_power": power, "hysteresis": 1})
    with nullcontext() if most < 6 else pytest.raises(TrainingError, match="no step was applied"):
        train(job, {}, alone)
    records = records_of(job)
    assert records.end is not None and least <= (skipped := sum(each.skipped for each in records.steps)) <= most
    assert f"all 6 steps are over; {skipped} of 6 were skipped: gradients overflowed" in records.end.reason


def test_a_run_that_goes_on_with_a_loss_that_is_not_finite_and_skips_all_does_not_end_well(
    quick, make_job, alone, monkeypatch
):
    """Under a loss scale that is still to fall, after steps that were applied."""
    train(make_job(steps=2, precision="bf16"), {}, alone)
    monkeypatch.setattr(StepResult, "loss", math.nan)
    monkeypatch.setattr(StepResult, "skipped", True)
    fp16 = {"name": "fp16", "initial_scale_power": 200, "hysteresis": 1}
    with pytest.raises(
        TrainingError, match=r"no step was applied: .*4 of 6 were skipped.*; the loss is nan: weights or"
    ):
        train(make_job(precision=fp16), {}, World.single("cpu"))


def test_a_report_that_does_not_fit_the_disk_costs_only_itself(make_job, alone, monkeypatch, capsys):
    def full(run_dir):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shoal.jobs.outcome.write_report", full)
    monkeypatch.setattr("shoal.jobs.train.peak_flops", lambda engine: 1e11)
    outcome = train(make_job(), {}, alone)
    with pytest.raises(CheckpointError, match=r"report of .*/run cannot be written: .*No space.*: shoal report .*/run"):
        told(outcome)
    said = capsys.readouterr().out
    assert "all 6 steps were trained" in said and "validation loss" in said and "report: " not in said


def test_a_directory_holds_one_run(quick, make_job, alone):
    train(make_job(), {}, alone)
    with pytest.raises(UserError, match=r'already holds a run: continue it with resume = "auto"'):
        train(make_job(run={"resume": "never"}), {}, World.single("cpu"))


def said_of(job: Job) -> list[str]:
    return [each.message.split(" is used from here on")[0] for each in records_of(job).warnings]


def test_what_a_job_gives_now_wins_and_is_said(quick, make_job, alone, tmp_path):
    """On the run's own directory and from another one's checkpoint; from the first step on."""
    model = {"dropout": 0.0}
    train(make_job(steps=3, lr=1e-2, schedule="cosine", model=model), {}, alone)
    now = {
        "steps": 12,
        "lr": 4e-2,
        "schedule": "cosine",
        "weight_decay": 0.2,
        "clip": 0.5,
        "precision": "bf16",
        "global_batch": 4,
    }
    (tmp_path / "more").mkdir()
    for number in range(4):
        (tmp_path / "more" / f"{number}.txt").write_text(
            "".join(f"{i} + {number} = {i + number}\n" for i in range(900))
        )
    options = {"data": {"source": str(tmp_path / "more")}, "model": {"dropout": 0.1}}
    elsewhere = make_job(run={"dir": str(tmp_path / "b"), "resume": str(tmp_path / "run")}, **options, **now)
    train(elsewhere, {}, World.single("cpu"))
    train(make_job(**options, **now), {}, World.single("cpu"))
    for job in (elsewhere, make_job()):
        assert said_of(job) == [
            "model.dropout = 0.1", f"data.source = {str(tmp_path / 'more')!r}", "weight_decay = 0.2", "lr = 0.04",
            "global_batch = 4", "precision = bf16", "clip = 0.5", "schedule: total = 12",
        ]  # fmt: skip
        rates = [each.lr for each in records_of(job).steps if each.step > 3]
        assert rates == pytest.approx([4e-2 * _cosine(step, 12, 0, 0.1) for step in range(3, 12)])


def test_data_that_have_changed_are_said(quick, make_job, alone, corpus, tmp_path, capsys):
    """A document comes before the others, so all are numbered anew: by number it is drawn which are held out."""
    own, run_dir = tmp_path / "own", tmp_path / "run"
    shutil.copytree(corpus, own)
    train(make_job(steps=2, data={"source": str(own)}), {}, alone)
    for path in own.iterdir():
        path.touch()
    train(make_job(steps=3, data={"source": str(own)}), {}, World.single("cpu"))
    evaluate_run(run_dir)
    assert said_of(make_job()) == [] and "has changed" not in capsys.readouterr().err
    (own / "000.txt").write_text("1 + 1 = 2")
    evaluate_run(run_dir)
    assert "has changed since the run, so what is held out of it now may have been trained" in capsys.readouterr().err
    train(make_job(steps=4, data={"source": str(own)}), {}, World.single("cpu"))
    assert said_of(make_job()) == [
        f"data.source = {str(own)!r} has changed since the checkpoint: an epoch's samples will not come exactly once, "
        "and what was held out then may be trained on"
    ]
    train(make_job(steps=5, data={"source": str(own)}), {}, World.single("cpu"))
    assert len(said_of(make_job())) == 1, "it is what the newest checkpoint was trained with"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"d_model": 32}},
            r"model.d_model = 32, but the checkpoint was trained with 16, and that cannot change",
        ),
        ({"model": {"heads": 4}}, r"model.heads = 4, but"),
        ({"seed": 1}, r"train.seed = 1, but the checkpoint was trained with 0.*held out"),
        ({"data": {"validation": 0.3}}, r"data.validation = 0.3, but"),
        ({"data": {"tokenizer": "bpe:300"}, "model": {"vocab_size": 300}}, r"model.vocab_size = 300, but"),
        (
            {"data": {"tokenizer": "bpe:257"}},
            r"data.tokenizer = 'bpe:257' gives other ids than the tokenizer.*\('bytes'\)",
        ),
    ],
)
def test_what_a_trained_model_cannot_follow_is_refused_by_name(quick, make_job, alone, changes, message):
    train(make_job(steps=1), {}, alone)
    with pytest.raises(UserError, match=message):
        train(make_job(steps=2, **changes), {}, World.single("cpu"))


@pytest.mark.parametrize(
    ("then", "now", "refused"),
    [
        ({"name": "mlp", "sizes": [2, 3]}, {"activation": "relu", "dropout": 0.0}, None),
        ({"name": "mlp", "sizes": [2, 3], "activation": "relu"}, {"activation": "tanh"}, "activation = 'tanh'"),
        ({"name": "gpt", "preset": "1m", "vocab_size": 9}, {"norm": "rmsnorm", "norm_eps": 1e-5}, None),
        ({"name": "gpt", "preset": "1m", "vocab_size": 9}, {"norm": "rmsnorm", "tied": False}, "tied = False"),
        ({"name": "gpt", "preset": "1m", "vocab_size": 9}, {"preset": "5m"}, "preset = '5m'"),
        ({"name": "hf", "config": {"model_type": "gpt2", "n_layer": 1}}, {"n_head": 12}, None),
    ],
)
def test_a_default_that_is_written_out_is_no_change(then, now, refused):
    about = {"data": {}, "tokenizer": None, "content": "", "classes": [], "model": then}
    with nullcontext() if refused is None else pytest.raises(UserError, match=f"model.{refused}, but the checkpoint"):
        assert changes(about, {**about, "model": {**then, **now}}) == []


def test_a_run_whose_only_checkpoint_is_damaged_does_not_start_anew(quick, make_job, alone, tmp_path):
    train(make_job(steps=1), {}, alone)
    only = tmp_path / "run" / "checkpoints" / "step-00000001"
    victim = max(only.iterdir(), key=lambda path: path.stat().st_size)
    victim.write_bytes(b"\0" + victim.read_bytes()[1:])
    for resume in ("auto", str(tmp_path / "run"), str(only)):
        with pytest.raises(CheckpointError, match=rf"{victim.name}: contents changed"):
            train(make_job(steps=2, run={"resume": resume}), {}, World.single("cpu"))
    shutil.rmtree(only)  # what the message says
    assert train(make_job(steps=2), {}, World.single("cpu")).step == 2


@pytest.mark.parametrize("save_every", [0, 2])
def test_a_last_checkpoint_that_fails_is_the_end_of_a_run(quick, make_job, alone, monkeypatch, save_every):
    written = checkpoint.save.dcp.write_pieces

    def full(path, rank, pieces):
        if path.name.startswith("step-00000006"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(path, rank, pieces)

    monkeypatch.setattr(checkpoint.save.dcp, "write_pieces", full)
    job = make_job(run={"save_every": save_every})
    with pytest.raises(
        CheckpointError, match=r"all 6 steps were trained, but the newest weights are not saved.*step 6.*No space left"
    ):
        train(job, {}, alone)
    end = records_of(job).end
    assert end is not None and "No space left" in end.reason
    assert [row.step for row in checkpoint.listing(Path(job.run.dir) / "checkpoints")] == ([4, 2] if save_every else [])
    monkeypatch.setattr(checkpoint.save.dcp, "write_pieces", written)
    assert train(make_job(), {}, World.single("cpu")).step == 6


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"data": {"source": "/nowhere/at/all.txt"}},
            UserError,
            "no such file, directory or glob: /nowhere/at/all.txt",
        ),
        (
            {"data": {"sequence": 16}, "model": {"sequence": 8}},
            UserError,
            "data.sequence = 16 is longer than the 8 tokens",
        ),
        ({"model": {"vocab_size": 100}}, UserError, "give model.vocab_size = 257"),
        ({"model": {"name": "bert", "vocab_size": 257}}, UserError, "and the mask: give model.vocab_size = 258"),
        (
            {"model": {"sequence": "long"}, "data": {"sequence": None}},
            UserError,
            "model.sequence = 'long': give the number of tokens in a row",
        ),
        (
            {"model": {"sequence": 0}, "data": {"sequence": None}},
            UserError,
            "model.sequence = 0: give the number of tokens in a row, at least 1",
        ),
        ({"model": {"layers": 0}}, UserError, "model.layers = 0 of GPT must be greater than 0"),
        (
            {"optimizer": {"momentum": 0.9}},
            UserError,
            "train.optimizer = {'momentum': 0.9} has no name: give it one of",
        ),
        ({"model": {"layer": 3}}, UserError, "model.layer is not a setting of gpt"),
        ({"optimizer": "adamv"}, UserError, 'Did you mean "adam'),
        ({"optimizer": {"name": "sgd", "momentun": 0.9}}, UserError, 'Did you mean "momentum"?'),
        ({"optimizer": {"name": "sgd", "momentum": -1.0}}, UserError, "Invalid momentum"),
        ({"optimizer": {"name": "sgd", "weight_decay": 0.1}}, UserError, "in [train]: give train.weight_decay"),
        ({"optimizer": {"name": "sgd", "lr": 0.1}}, UserError, "in [train]: give train.lr"),
        ({"precision": "bf61"}, UserError, 'Did you mean "bf16"?'),
        ({"schedule": "cosin"}, UserError, 'train.schedule = "cosin" is not one of constant, linear, cosine. Did you'),
        ({"buffers": "exakt"}, UserError, 'train.buffers = "exakt": "exact" refuses'),
        ({"steps": None, "seconds": 1.0, "schedule": "cosine"}, UserError, 'or schedule = "constant"'),
        ({"run": {"trackers": ["tensorbord"]}}, UserError, 'Did you mean "tensorboard"?'),
        ({"run": {"resume": "/nowhere"}}, UserError, 'run.resume = "/nowhere": no such directory'),
        ({"run": {"resume": "/proc"}}, CheckpointError, "in /proc: give the directory of a checkpoint or a run"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(quick, make_job, alone, changes, error, message):
    with pytest.raises(error) as caught:
        train(make_job(**changes), {}, alone)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "config", "fits"),
    [("lstm", None, False), ("gpt", None, True), ("hf", "mamba", False), ("hf", "llama", True)],
)
def test_a_model_that_cannot_keep_documents_apart_is_refused(make_job, name, config, fits):
    model = {"name": name} | ({"config": {"model_type": config}, "vocab_size": 257} if config else {})
    model |= {"preset": "1m"} if name == "gpt" else {}
    job = replace(make_job(data={"attend": "document"}), model=model)
    if not fits:
        with pytest.raises(UserError, match=r'"document": .* would go on from one to the next: give attend = "row"'):
            settle(job, {}, Sizes(1, 1))
        job = replace(job, data=replace(job.data, attend="row"))  # what the message says
    assert settle(job, {}, Sizes(1, 1)).data.train.attend == job.data.attend


def test_an_empty_corpus_is_named(quick, make_job, alone, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="put some there"):
        train(make_job(data={"source": str(tmp_path / "empty")}), {}, alone)
    (tmp_path / "empty" / "a.txt").touch()
    with pytest.raises(UserError, match=str(tmp_path / "empty")):
        train(make_job(data={"source": str(tmp_path / "empty")}), {}, World.single("cpu"))


@pytest.mark.parametrize(
    "model", [{"name": "bert", "layers": 1, "d_model": 16, "heads": 2}, {"name": "lstm", "embedding": 8, "hidden": 8}]
)
def test_other_language_models_train_from_a_job(quick, make_job, alone, model):
    writes = model["name"] == "lstm"
    job = replace(make_job(steps=2, run={"sample": "1 +" * writes}), model=model)
    train(job, {}, alone)
    assert all(each.mfu for each in records_of(job).steps), "FLOPs are counted where there is no formula"
    assert len(records_of(job).samples) == writes
    run = records_of(job).run
    assert run is not None and run.config["model.vocab_size"]["value"] == {"bert": 258, "lstm": 257}[model["name"]], (
        "BERT has a mask"
    )


def test_a_model_may_have_more_ids_than_its_tokenizer(quick, make_job, alone):
    job = make_job(steps=1, lr=1e-9, model={"vocab_size": 2000}, run={"sample": "1"})
    train(job, {}, alone)
    (sample,) = records_of(job).samples
    assert len(sample.text) < 160, "most of what was drawn stands for nothing"


def test_weights_are_exported_from_a_run_alone(quick, make_job, alone, tmp_path):
    job = make_job(steps=2)
    train(job, {}, alone)
    assert export_checkpoint(Path(job.run.dir), tmp_path / "out") == tmp_path / "out"
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "out").iterdir()}
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("3 + 4") == list(b"3 + 4") and tokenizer.eos_token_id == 256
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match=r"give by --job the resolved.toml of the run that made the checkpoint"):
        export_checkpoint(tmp_path / "bare", tmp_path / "out")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        export_checkpoint(tmp_path / "bare", tmp_path / "out", Path(job.run.dir) / "resolved.toml")


def test_a_checkpoint_away_from_its_run_is_used_with_what_its_refusals_name(quick, make_job, alone, tmp_path):
    job, away = make_job(steps=1, data={"tokenizer": "bpe:280"}), tmp_path / "away" / "step-00000001"
    train(job, {}, alone)
    shutil.copytree(tmp_path / "run" / "checkpoints" / away.name, away)
    (tmp_path / "own").mkdir()
    for name in ("resolved.toml", "short.toml"):
        text = (tmp_path / "run" / "resolved.toml").read_text()
        short = "\n".join(line for line in text.splitlines() if not line.startswith(("vocab_size", "sequence")))
        (tmp_path / "own" / name).write_text(text if name == "resolved.toml" else short)
    with pytest.raises(UserError, match=r"--job .*needs vocab_size.*Give by --job the resolved.toml of the run"):
        generate_text(away, "3 +", tmp_path / "own" / "short.toml", tokens=4)
    resolved = tmp_path / "own" / "resolved.toml"
    for use in (lambda: generate_text(away, "3 +", resolved, tokens=4), lambda: evaluate_run(away, job_file=resolved)):
        with pytest.raises(UserError, match=rf"{away} has no directory 'tokenizer': copy it there from the run"):
            use()
        shutil.copytree(tmp_path / "run" / "tokenizer", away / "tokenizer")
        assert use() is not None
        shutil.rmtree(away / "tokenizer")
    whole = tmp_path / "run" / "resolved.toml"  # with the tokenizer beside it
    assert evaluate_run(away, job_file=whole)[0].loss == evaluate_run(tmp_path / "run")[0].loss
    assert (export_checkpoint(away, tmp_path / "out", whole) / "tokenizer.json").exists()
    best, runs = away.rename(tmp_path / "best"), (tmp_path / "run" / "checkpoints").rename(tmp_path / "step-runs")
    losses = [evaluate_run(path, job_file=whole)[0].loss for path in (best, runs)]
    assert losses == [evaluate_run(runs / "step-00000001", job_file=whole)[0].loss] * 2, "whatever they are called"


def test_a_run_keeps_its_tokenizer_which_another_source_can_be_trained_with(
    quick, make_job, alone, tmp_path, monkeypatch
):
    """What the refusal says: a BPE of another corpus has other ids, the run's own one goes on; also where the cache has
    gone."""
    job = make_job(steps=1, data={"tokenizer": "bpe:280"}, run={"eval_samples": 0})
    train(job, {}, alone)
    assert evaluate_run(tmp_path / "run")[0].loss == pytest.approx(records_of(job).evals[-1].loss, rel=1e-6)
    (tmp_path / "more").mkdir()
    for number in range(4):
        (tmp_path / "more" / f"{number}.txt").write_text("".join(f"word {i} + {number}\n" for i in range(900)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another cache"))
    other = {"source": str(tmp_path / "more")}
    with pytest.raises(
        UserError, match=r"data.tokenizer = 'bpe:280' gives other ids.*Give the directory 'tokenizer' of the run"
    ):
        train(make_job(steps=2, data={**other, "tokenizer": "bpe:280"}), {}, World.single("cpu"))
    job = make_job(steps=2, data={**other, "tokenizer": str(tmp_path / "run" / "tokenizer")})
    assert train(job, {}, World.single("cpu")).step == 2
    assert said_of(job)[0] == f"data.source = {str(tmp_path / 'more')!r}"
