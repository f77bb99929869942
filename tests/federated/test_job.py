"""`shoal fed sim`: from a job file to a report."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.data.corpus import open_corpus
from shoal.errors import CheckpointError, UserError
from shoal.federated.settings import STATE
from shoal.federated.state import seconds_of
from shoal.jobs.export import evaluate_run
from shoal.jobs.federated.holdings import deal
from shoal.jobs.federated.serve import Serving, serve
from shoal.jobs.federated.simulate import simulate
from shoal.jobs.federated.take_part import Taking, _own, take_part
from shoal.jobs.read import load_job
from shoal.report.metrics import read_metrics
from shoal.report.page import write_report
from tests.federated.common import CLASSES, INPUTS, samples
from tests.jobs.logs import fill_at

JOB = """
[model]
name = "mlp"
sizes = [{inputs}, 8, {classes}]
[data]
source = "{source}"
validation = 0.2
[train]
global_batch = 8
optimizer = "sgd"
lr = 0.2
weight_decay = 0.0
[federated]
rounds = 6
clients = 5
partition = {{name = "label", alpha = 0.5}}
local_epochs = 1
dropout = 0.2
[run]
dir = "{run_dir}"
trackers = []
"""


@pytest.fixture
def job_file(tmp_path):
    inputs, labels = (np.stack([each[key].numpy() for each in samples()]) for key in ("inputs", "labels"))
    np.savez(tmp_path / "set.npz", inputs=inputs, labels=labels)
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(inputs=INPUTS, classes=CLASSES, source=tmp_path / "set.npz", run_dir=tmp_path / "run"))
    return path


def rounds_of(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(each["step"], each["loss"]) for each in lines if each["kind"] == "step"]


def test_a_run_ends_with_a_report_of_its_clients_and_goes_on_as_if_nothing_had_been(job_file, tmp_path):
    run = tmp_path / "run"
    shown = CliRunner().invoke(app, ["fed", "sim", str(job_file), "--set", "federated.rounds=3"])
    assert shown.exit_code == 0, shown.output
    assert "5 clients train on" in shown.output and "all 3 rounds were trained" in shown.output
    again = simulate(*load_job(job_file))
    assert again.step == 6 and [number for number, _ in rounds_of(run)] == [1, 2, 3, 4, 5, 6]
    whole = simulate(*load_job(job_file, [f"run.dir={tmp_path / 'whole'}"]))
    assert rounds_of(run) == rounds_of(whole.run_dir)

    records = read_metrics(run / "metrics.jsonl")
    assert sum(each.dropped for each in records.rounds) > 0
    assert all(each.asked == 5 == each.results + each.dropped for each in records.rounds)
    assert len(records.evals) == 7 and records.evals[-1].accuracy > records.evals[0].accuracy
    page = again.report.read_text()
    assert "<h2>Clients</h2>" in page and "Went away" in page and "Accuracy by client" in page
    top = CliRunner().invoke(app, ["top", str(run), "--once"])
    assert "clients" in top.output and f"{records.rounds[-1].results} of 5" in top.output


def test_the_model_of_a_run_is_a_checkpoint(job_file, tmp_path):
    outcome = simulate(*load_job(job_file, ["federated.rounds=4", "federated.dropout=0"]))
    found, accuracy = evaluate_run(outcome.run_dir, str(tmp_path / "set.npz"))
    last = read_metrics(outcome.run_dir / "metrics.jsonl").evals[-1]
    assert found.tokens == len(samples()) and accuracy == pytest.approx(last.accuracy, abs=0.15)
    with pytest.raises(UserError, match="give --data"):
        evaluate_run(outcome.run_dir)


@pytest.mark.matrix
def test_staleness_is_in_the_report(job_file):
    buffered = ["federated.buffer=2", "federated.speeds=1.0", "federated.rounds=12"]
    outcome = simulate(*load_job(job_file, buffered))
    assert "Results by age, updates" in write_report(outcome.run_dir).read_text()


def test_what_is_in_the_way_is_said(job_file, tmp_path):
    def refused(says, *assignments):
        with pytest.raises(UserError, match=says):
            simulate(*load_job(job_file, list(assignments)))

    refused("remove the table", "plan.dp=2")
    refused("remove the table", "plan=auto")
    refused("run.at with `shoal fed`.*Leave run.at out", "run.at=[{step=1,plan={zero=1}}]")
    refused("run.norms_every with `shoal fed`", "run.norms_every=1")
    refused("least = 3, but an update is made of federated.buffer = 2", "federated.least=3", "federated.buffer=2")
    refused('take "fp32"', "train.precision=bf16")
    refused("has no documents", "federated.partition=document")
    refused("give at most 100", "federated.speeds=1000")
    refused("at most that many", "federated.clients=500")
    refused('Did you mean "fedavg"', "federated.strategy=fedavgg")
    refused("'bulyan' is Flower's: `shoal fed sim --flower` has it", "federated.strategy=bulyan")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    refused("holds a run of `shoal train`")
    simulate(*load_job(job_file, ["federated.rounds=1", f"run.dir={tmp_path / 'b'}"]))
    refused("federated.clients = 4, but", "federated.clients=4", f"run.dir={tmp_path / 'b'}")
    refused("already holds rounds", "run.resume=never", f"run.dir={tmp_path / 'b'}")


@pytest.fixture
def quick(monkeypatch):
    """No report is drawn."""
    monkeypatch.setattr("shoal.jobs.outcome.write_report", lambda run_dir: run_dir / "report.html")


def test_rounds_without_enough_results_are_told_of_once(job_file, quick, capsys):
    late = ["federated.rounds=3", "federated.deadline=0.5", "federated.dropout=0"]  # less than any client's one step
    outcome = simulate(*load_job(job_file, late))
    said = "warning: round 1 left the model as it was: of 5 clients 0 went away, 5 were late, and 0 failed"
    assert said in " ".join(capsys.readouterr().out.split())
    assert len(read_metrics(outcome.run_dir / "metrics.jsonl").warnings) == 1


def test_a_state_that_cannot_be_read_is_gone_on_from_as_its_message_says(job_file, tmp_path, quick):
    simulate(*load_job(job_file, ["federated.rounds=1"]))
    path = tmp_path / "run" / STATE
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=rf"delete {tmp_path / 'run'} to begin again"):
        simulate(*load_job(job_file))
    shutil.rmtree(tmp_path / "run")
    assert simulate(*load_job(job_file, ["federated.rounds=2"])).step == 2


def test_the_time_limit_is_of_all_attempts_together(job_file, tmp_path, quick):
    limited = ["federated.rounds=1000000", "run.save_every=1", "train.seconds=0.3"]
    first = simulate(*load_job(job_file, limited))
    assert "time limit" in first.reason and seconds_of(tmp_path / "run") >= 0.3
    again = simulate(*load_job(job_file, limited))
    assert again.step == first.step and "time limit was reached before" in again.reason
    more = simulate(*load_job(job_file, [*limited[:2], "train.seconds=1000", f"federated.rounds={again.step + 2}"]))
    assert more.step == again.step + 2


def test_numbers_of_a_server_and_a_client_that_are_none_are_refused(job_file):
    given = load_job(job_file)
    for serving, message in (
        (Serving(at_first=0), "--begin-with 0: give the number of clients"),
        (Serving(patience=0.0), "--patience 0.0"),
        (Serving("127.0.0.1:\u00b2"), "no address"),
        (Serving("127.0.0.1:" + "9" * 5000), "no address"),
    ):
        with pytest.raises(UserError, match=message):
            serve(*given, serving)
    for wait, nproc, message in ((600.0, 0, "--nproc 0: give at least 1"), (-1.0, None, "--wait -1.0: give a number")):
        with pytest.raises(UserError, match=message):
            take_part(job_file, [], Taking("127.0.0.1:9443", wait=wait), nproc)


def test_a_client_whose_plan_nobody_would_find_is_refused(job_file):
    sets = ["plan.name=auto", "plan.measure=3"]
    with pytest.raises(UserError, match=r"Give the whole \[plan\] in place of plan.name"):
        take_part(job_file, sets, Taking("127.0.0.1:9443"), 2)


def test_a_log_that_cannot_be_written_does_not_end_the_rounds(job_file, tmp_path, monkeypatch, capsys):
    fill_at(2, monkeypatch)
    assert simulate(*load_job(job_file, ["federated.rounds=3"])).step == 3
    assert [step for step, _ in rounds_of(tmp_path / "run")] == [1]
    assert capsys.readouterr().out.count("metrics.jsonl cannot be written any more") == 1


def test_training_in_one_place_is_as_long_as_that_of_each_client(job_file):
    job, origins = load_job(job_file)
    assert job.train.epochs == 6 and origins["train.epochs"] == "planner"
    steps = job_file.read_text().replace("local_epochs = 1", "local_steps = 4")
    job_file.write_text(steps)
    assert load_job(job_file)[0].train.steps == 24


def test_documents_go_to_clients_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(8):
        (corpus / f"{number}.txt").write_text(chr(97 + number) * 40 * (number + 1))
    path = tmp_path / "job.toml"
    path.write_text(
        f'[model]\nname = "lstm"\nembedding = 4\nhidden = 4\n[data]\nsource = "{corpus}"\nsequence = 8\n'
        f'[federated]\nclients = 3\nrounds = 2\npartition = "document"\n'
        f'[run]\ndir = "{tmp_path / "run"}"\ntrackers = []\n'
    )
    dealt = deal(*load_job(path))
    letters = [
        {int(token) for row in dealt.shares.of(client) for token in dealt.dataset[int(row)]["input_ids"]} - {256}
        for client in range(3)
    ]
    assert len(set().union(*letters)) == 8 == sum(map(len, letters))
    outcome = simulate(*load_job(path))
    assert outcome.step == 2 and np.isfinite(rounds_of(outcome.run_dir)[-1][1])


def test_a_tokenizer_is_one_for_all_clients_and_rounds(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("a few words of one server, and of its clients\n" * 40)
    path = tmp_path / "job.toml"
    path.write_text(
        f'[model]\nname = "lstm"\nembedding = 4\nhidden = 4\n[data]\nsource = "{tmp_path / "text.txt"}"\nsequence = 8\n'
        f'tokenizer = "bpe:270"\n[federated]\nclients = 2\nrounds = 1\nlocal_steps = 1\n'
        f'[run]\ndir = "{tmp_path / "run"}"\ntrackers = []\n'
    )
    simulate(*load_job(path))
    with pytest.raises(UserError, match=r'"bpe:270" would be trained on this client.s own data'):
        _own(*load_job(path), Taking("127.0.0.1:1", key="own.key"))
    written = [f"data.tokenizer={tmp_path / 'run' / 'tokenizer'}"]
    dealt, _, _ = _own(*load_job(path, written), Taking("127.0.0.1:1"))
    assert dealt.settled.tokenizer.vocab_size == 270
    assert _own(*load_job(path), Taking("127.0.0.1:1", client=1))[2] == 1
    (tmp_path / "text.txt").write_text("other words by now: jackdaws love my big sphinx of quartz\n" * 40)
    with pytest.raises(UserError, match=r"fingerprint of data\.tokenizer = .* were trained with"):
        simulate(*load_job(path, ["federated.rounds=2"]))


@pytest.mark.matrix
def test_packages_of_the_standard_library_are_groups_of_documents():
    groups = open_corpus("stdlib").groups()
    assert len(groups) == sum(1 for _ in open_corpus("stdlib").stream()) and {"asyncio", "json", "ast"} <= set(groups)
