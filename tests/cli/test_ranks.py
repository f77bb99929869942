"""The command line with ranks of its own: from end to end, and when something goes wrong in the middle."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import psutil
import pytest

from shoal import checkpoint
from shoal.cli.demo import DEMO
from shoal.device import peak
from shoal.jobs.drill import VARIABLE as DRILL
from shoal.report.evaluations import read_evaluations
from shoal.report.metrics import read_metrics
from tests.cli.conftest import train_here

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses(run_dir: Path) -> list[float]:
    return [record.loss for record in read_metrics(run_dir / "metrics.jsonl").steps]


def has_step(run_dir: Path, step: int) -> bool:
    return (run_dir / "metrics.jsonl").exists() and len(losses(run_dir)) >= step


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if has_step(run_dir, step):
            return
        time.sleep(0.05)
    state = f"exit code {process.poll()}"
    process.kill()
    raise AssertionError(f"no step {step} within {seconds:.0f} s; {state}; it said:\n{''.join(process.communicate())}")


@pytest.mark.usefixtures("forked")
def test_two_ranks_train_and_one_goes_on(shoal, job_file, tmp_path):
    train_here(job_file, f"run.dir={tmp_path / 'whole'}")
    first = shoal("train", job_file, "--nproc", 2, "--set", "train.steps=3")
    assert (first.code, first.err) == (0, "")
    assert first.out.splitlines()[-1] == f"report: {tmp_path / 'run' / 'report.html'}"
    assert "plan: dp = 2 (another plan could spare at most " in first.out
    assert shoal("train", job_file, "--nproc", 1, "--resume", "auto").code == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)
    refused = shoal("train", job_file, "--nproc", 2, "--resume", "never")
    assert refused.code == 2
    assert "already holds a run" in refused.err and "Traceback" not in refused.err


def test_an_interrupted_run_leaves_checkpoint_and_report_and_goes_on(start, shoal, job_file, tmp_path):
    run_dir = tmp_path / "run"
    process = start("train", job_file, "--nproc", 2, "--set", "train.steps=1000000", "--set", "run.save_every=0")
    wait_for_step(process, run_dir, 5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    records = read_metrics(run_dir / "metrics.jsonl")
    assert records.end is not None and records.end.reason == "stopped by SIGTERM"
    (row,) = checkpoint.listing(run_dir / "checkpoints")
    assert (row.step, row.state) == (records.steps[-1].step, "ok")
    assert (run_dir / "report.html").exists()
    train_here(job_file, f"train.steps={row.step + 2}")
    assert len(losses(run_dir)) == row.step + 2


@pytest.mark.usefixtures("forked")
def test_a_signal_that_reaches_a_rank_alone_ends_the_run_with_its_code(shoal, job_file, tmp_path):
    run_dir = tmp_path / "run"

    def stop() -> None:
        while not has_step(run_dir, 5):
            time.sleep(0.05)
        ranks = psutil.Process().children()
        next(rank for rank in ranks if rank.name() == "shoal-rank1").send_signal(signal.SIGTERM)

    Thread(target=stop, daemon=True).start()
    long = ("--set", "train.steps=1000000", "--set", "train.seconds=60", "--set", "run.save_every=0")
    ended = shoal("train", job_file, "--nproc", 2, *long)
    assert ended.code == 128 + signal.SIGTERM
    assert read_metrics(run_dir / "metrics.jsonl").end.reason == "stopped by SIGTERM"  # type: ignore[union-attr]
    (row,) = checkpoint.listing(run_dir / "checkpoints")
    assert row.state == "ok"


@pytest.fixture
def slow(tmp_path, monkeypatch):
    """Ranks wait before each step: those that train on beside a test leave it the cores."""
    (tmp_path / "drill").mkdir()
    (tmp_path / "drill/pace").write_text("0.05 1000000")
    monkeypatch.setenv(DRILL, str(tmp_path / "drill"))


@pytest.mark.usefixtures("slow", "forked")
def test_a_running_job_has_its_directory_and_a_killed_one_goes_on_until_a_rank_dies(start, shoal, job_file, tmp_path):
    """What reads a run goes on; a second job is refused before its ranks start; after kill -9 the next one starts at
    once: from the last checkpoint, and it says so; where the state was on a disk, from the last update."""
    run_dir, copy = tmp_path / "run", tmp_path / "copy"
    memory = f'plan.memory={{disk = "{tmp_path / "disk"}"}}'
    endless = ("--set", "train.steps=1000000", "--set", "run.save_every=10", "--set", memory)
    process = start("train", job_file, "--nproc", 2, *endless)
    wait_for_step(process, run_dir, 12)
    second = shoal("train", job_file, "--nproc", 2)
    assert second.code == 2 and f"{run_dir} is in use by process" in second.err and "give another run.dir" in second.err
    assert shoal("report", run_dir).code == shoal("ckpt", "ls", run_dir).code == 0
    screen = shoal("top", run_dir).out
    assert "trains" in screen and all(str(rank.pid) in screen for rank in psutil.Process(process.pid).children())
    train_here(job_file, f"run.dir={tmp_path / 'other'}")
    ranks = psutil.Process(process.pid).children()
    process.kill()
    _, left = psutil.wait_procs(ranks, timeout=10)
    assert not left, "ranks die with their launcher"
    assert (run_dir / "run.lock").exists()
    seen = read_metrics(run_dir / "metrics.jsonl").steps[-1].step
    newest = max(row.step for row in checkpoint.listing(run_dir / "checkpoints") if row.state == "ok")
    shutil.copytree(run_dir, copy)

    last = ("--resume", "auto", "--set", f"train.steps={newest + 3}", "--set", "train.lr=3e-2")
    answer = shoal("train", job_file, "--nproc", 1, *last, "--set", f"run.dir={copy}")
    assert answer.code == 0 and not (copy / "run.lock").exists()
    assert f"resumed from step {newest} (2 ranks then, 1 now)\n" in answer.out
    assert "lr = 0.03 is used from here on; the checkpoint was trained with 0.01\n" in answer.out
    records = read_metrics(copy / "metrics.jsonl")
    assert [record.step for record in records.steps] == list(range(1, newest + 4))
    assert records.end is not None and records.attempts == 2

    again = start("train", job_file, "--nproc", 2, *endless)
    wait_for_step(again, run_dir, seen + 3)
    dying = next(rank for rank in psutil.Process(again.pid).children() if rank.name() == "shoal-rank1")
    dying.kill()
    _, err = again.communicate(timeout=30)
    assert again.returncode == 4
    assert err.startswith("error: rank 1 on host") and "SIGKILL" in err
    steps = [
        json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines() if '"loss"' in line
    ]
    assert newest <= seen <= steps[steps.index(seen) + 1], "from the last update on, not from the checkpoint"


def test_a_last_checkpoint_that_does_not_fit_the_disk_ends_with_code_5(job_file, tmp_path):
    """The real process, which may write no file above 100 KiB: a checkpoint is larger."""
    command = f"ulimit -f 100; exec {sys.executable} -m shoal.cli train {job_file} --nproc 1 --set model.d_model=64"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 5, done.stderr
    assert (
        done.stderr.count(
            "error: all 6 steps were trained, but the newest weights are not saved: saving the checkpoint of step 6"
        )
        == 1
    )
    assert "free space there" in done.stderr and "Traceback" not in done.stderr
    assert done.stdout.count("warning: saving the checkpoint of step") == 3


@pytest.mark.usefixtures("forked")
def test_a_script_runs_on_ranks_with_its_arguments(shoal, job_file, tmp_path):
    answer = shoal(
        "run",
        EXAMPLES / "train_script.py",
        "--nproc",
        2,
        "--",
        "--source",
        tmp_path / "corpus",
        "--steps",
        2,
        "--save",
        tmp_path / "ckpt",
    )
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.count("validation loss") == 1
    assert [row.step for row in checkpoint.listing(tmp_path / "ckpt")] == [2]


WRONG_SHAPE = """
from functools import partial
import torch, shoal
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.Linear(17, 1))
data = [{"x": torch.zeros(8), "y": torch.zeros(1)} for _ in range(8)]

def loss(model, mb):
    return (model(mb["x"]) - mb["y"]).square().sum(), mb["y"].shape[0]

engine = shoal.Engine(model, loss, partial(torch.optim.SGD, lr=0.1), global_batch=4)
for batch in engine.batches(data, epochs=1):
    engine.step(batch)
"""


@pytest.mark.usefixtures("forked")
def test_a_shape_error_of_a_script_shows_the_scripts_own_lines(shoal, tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(WRONG_SHAPE)
    answer = shoal("run", script, "--nproc", 2)
    assert answer.code == 1
    assert 'return (model(mb["x"]) - mb["y"])' in answer.err
    assert "mat1 and mat2 shapes cannot be multiplied (2x16 and 17x1)" in answer.err
    assert "after 0 steps, in microbatch 1 of 1 on this rank: x (2, 8), y (2, 1)" in answer.err
    assert "shoal/training/step.py" not in answer.err, "our own frames are folded"
    assert answer.err.count("Traceback") == 1, "once for all ranks"


@pytest.mark.usefixtures("forked")
def test_the_doctor_brings_two_ranks_together(shoal, monkeypatch):
    monkeypatch.setattr(peak, "PEAK_SECONDS", 0.0)
    monkeypatch.setattr(peak, "CPU_SIZE", 64)
    answer = shoal("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(answer.out)["checks"]}
    assert checks["two ranks"]["state"] == "OK"
    carriers = {link["carrier"] for link in json.loads(answer.out)["links"]}
    assert carriers in ({"shared memory", "sockets"}, {"NCCL", "sockets"})
    assert answer.code == 0


@pytest.mark.matrix
def test_this_machine_is_measured_planned_for_trained_on_and_compared(shoal, job_file, tmp_path):
    """What was measured comes back from the file and from the cache; a run says what its steps were spent on, and the
    next plan says what was learned of it."""
    here = tmp_path / "here.toml"
    answer = shoal("plan", "--measure", here, "--nproc", 2)
    assert (answer.code, answer.err) == (0, "") and "an all-reduce of 2 ranks over shared memory" in answer.out
    assert shoal("plan", job_file, "--on", here, "--json").code == 0
    asked = ("plan", job_file, "--on", "here", "--set", "run.nproc=2", "--pin", "dp=2", "--json")
    (said,) = json.loads(shoal(*asked).out)["cluster"]["said"]
    assert "measured" in said and "an all-reduce of 2 ranks" in said
    assert shoal("train", job_file, "--nproc", 2, "--set", "train.steps=12", "--set", "run.save_every=0").code == 0
    told = json.loads(shoal("plan", "--compare", tmp_path / "run", "--json").out)
    terms = {each["what"]: each for each in told["terms"]}
    assert told["sampled"] == 6 and terms["time of a step: compute"]["measured"] > 0, told
    exchanged = terms["time of a step: data-parallel communication"]["measured"]
    assert exchanged is not None and exchanged >= 0, "nothing, where 30 KB have come before anybody waits for them"
    assert terms["sent by a rank: data-parallel communication"]["ratio"] == pytest.approx(1.0, rel=0.05)
    assert told["learned"].startswith("kept for the next prediction"), told["learned"]
    assert f"learned from {tmp_path / 'run'}" in " ".join(json.loads(shoal(*asked).out)["cluster"]["said"])
    refused = shoal("plan", job_file, "--measure", here)
    assert refused.code == 2 and "leave out all but --nproc" in refused.err


def test_the_demo_learns_more_than_a_nat(job_file, tmp_path):
    """Its first sixteenth already does."""
    train_here(DEMO, "train.steps=30", "run.eval_every=0", f"run.dir={tmp_path / 'demo'}")
    first, last = read_metrics(tmp_path / "demo" / "metrics.jsonl").evals
    assert first.loss - last.loss > 1.5


def test_an_export_that_does_not_fit_the_disk_ends_with_code_5_and_leaves_what_was_there(shoal, job_file, tmp_path):
    train_here(job_file, "model.d_model=64")
    assert shoal("ckpt", "export", tmp_path / "run", tmp_path / "out").code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    command = f"ulimit -f 100; exec {sys.executable} -m shoal.cli ckpt export {tmp_path / 'run'} {tmp_path / 'out'}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 5, done.stderr
    assert (
        f"error: the weights were not exported to {tmp_path / 'out'}" in done.stderr and "Traceback" not in done.stderr
    )
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert not (tmp_path / "out.tmp").exists()


@pytest.mark.matrix
def test_an_evaluator_beside_two_ranks_evaluates_every_checkpoint(shoal, job_file, tmp_path):
    every_step = ("--set", "run.eval_every=2", "--set", "run.keep=9")
    done = shoal("train", job_file, "--roles", "worker=2,evaluator=1", *every_step)
    assert (done.code, done.err) == (0, "")
    run_dir = tmp_path / "run"
    found, own = read_evaluations(run_dir), read_metrics(run_dir / "metrics.jsonl").evals
    assert [each.step for each in found] == [2, 4, 6]
    assert [each.loss for each in found] == pytest.approx([each.loss for each in own[1:]], rel=1e-6)
    assert (run_dir / "logs/evaluator0.log").read_text().endswith("training has ended\n")


@pytest.mark.parametrize(
    "arguments, tf_config, message",
    [
        (("--roles", "worker=2", "--nproc", 2), "", "--nproc and --roles both say how many ranks to start"),
        (("--roles", "worker=2,ps=1", "--set", "plan.tp=2"), "", "plan.tp = 2 with a parameter server"),
        (("--roles", "worker=2,ps=1", "--nodes", "2"), "", "--nodes and --roles both say"),
        (
            ("--roles", "worker=2"),
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator"}}',
            "TF_CONFIG has started this process already. Leave --roles out",
        ),
    ],
)
def test_roles_that_do_not_fit_are_refused(arguments, tf_config, message, shoal, job_file, tmp_path, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config)
    refused = shoal("train", job_file, *arguments)
    assert refused.code == 2 and message in refused.err
    assert not (tmp_path / "run").exists()
