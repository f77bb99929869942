"""`shoal train --roles ps=1,worker=2`: a job as a parameter server and workers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from shoal.report.metrics import RunRecords, read_metrics
from tests.cli.conftest import train_here

SERVED = ("--roles", "ps=1,worker=2")
TABLE = ("model.tied=false", 'server.tables=["token_embedding.weight"]')
ROWS = tuple(word for value in (*TABLE, "train.optimizer=adagrad", "train.weight_decay=0") for word in ("--set", value))


def read(run_dir: Path) -> RunRecords:
    return read_metrics(run_dir / "metrics.jsonl")


def test_a_server_and_workers_train_what_ranks_train_and_any_plan_goes_on(shoal, job_file, tmp_path):
    """Under `sync` a step is that of ranks, whatever its gradient is a mean of."""
    some = ("train.steps=4", "run.eval_every=2", "train.clip=0.5")
    given = [word for each in (*some, "server.policy=sync") for word in ("--set", each)]
    done = shoal("train", job_file, *SERVED, *given)
    assert (done.code, done.err) == (0, "")
    assert "starting 1 parameter server, 2 workers" in done.out and "all 4 steps were trained" in done.out
    ranks = tmp_path / "ranks"
    train_here(job_file, *some, f"run.dir={ranks}")
    served, plain = read(tmp_path / "run"), read(ranks)
    assert [each.step for each in served.steps] == [1, 2, 3, 4]
    for mine, theirs in zip(served.steps, plain.steps, strict=True):
        assert (mine.tokens, mine.lr, mine.epoch) == (theirs.tokens, theirs.lr, theirs.epoch)
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)
    assert [each.step for each in served.evals] == [0, 2, 4]
    assert served.evals[-1].loss == pytest.approx(plain.evals[-1].loss, rel=1e-4)
    last = served.servers[-1]
    assert (last.step, last.pushes, last.dropped, last.policy) == (4, 8, 0, "sync")
    assert sum(each["pushes"] for each in last.clients) == 8 and set(last.lags) == {"0"}
    assert not (tmp_path / "run/logs/worker0.log").read_text().count("Traceback")
    train_here(job_file, *some, "train.steps=5")
    assert read(tmp_path / "run").steps[-1].step == 5


def processes(run_dir: Path, role: str) -> list[int]:
    """Returns the processes of a role of the run in `run_dir`, by what their environment and words say."""
    found = []
    for each in Path("/proc").iterdir():
        try:
            words, variables = (each / "cmdline").read_text(), (each / "environ").read_text()
        except (OSError, ValueError):
            continue
        if "shoal.jobs" in words and str(run_dir.parent) in words and f'"type": "{role}"' in variables:
            found.append(int(each.name))
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("policy, more", [("sync", ()), ("async", ()), ("batch:3", ()), ("sync", ROWS)])
def test_servers_and_workers_of_a_job_that_are_killed_lose_nothing(policy, more, start, shoal, job_file, tmp_path):
    """Twenty kills of whichever of two servers and three workers: every step is there once, of all its samples."""
    run_dir, draw = tmp_path / "run", random.Random(1)
    some = (*more, "--set", "train.steps=3000", "--set", "run.save_every=100", "--set", "server.restarts=100")
    process = start("train", job_file, "--roles", "ps=2,worker=3", *some, "--set", f"server.policy={policy}")
    reached(run_dir, 5, process)
    for _ in range(20):
        if process.poll() is None and (found := processes(run_dir, "ps") + processes(run_dir, "worker")):
            os.kill(draw.choice(found), signal.SIGKILL)
        time.sleep(4.0 + 4.0 * draw.random())
    _, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    seen = read(run_dir)
    assert [each.step for each in seen.steps] == list(range(1, 3001))
    assert shoal("train", job_file, "--nproc", 1, *more, "--set", "train.steps=3001").code == 0


@pytest.mark.matrix
@pytest.mark.parametrize("role", ["worker", "ps"])
def test_a_task_that_is_killed_is_started_again_and_no_step_is_lost(role, start, job_file, tmp_path):
    run_dir = tmp_path / "run"
    process = start("train", job_file, *SERVED, "--set", "train.steps=300", "--set", "run.save_every=100")
    reached(run_dir, 20, process)
    os.kill(processes(run_dir, role)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "was killed by SIGKILL; it is started again" in err
    seen = read(run_dir)
    assert [each.step for each in seen.steps] == list(range(1, 301))
    last = seen.servers[-1]
    assert last.step == 300 == last.pushes - last.dropped


@pytest.mark.matrix
@pytest.mark.parametrize(("number", "alone"), [(signal.SIGTERM, ""), (signal.SIGINT, ""), (signal.SIGTERM, "ps")])
def test_a_signal_ends_a_served_job_with_a_checkpoint(number, alone, start, shoal, job_file, tmp_path):
    run_dir = tmp_path / "run"
    process = start("train", job_file, *SERVED, "--set", "train.steps=1000000", "--set", "run.save_every=0")
    reached(run_dir, 10, process)
    os.kill(processes(run_dir, alone)[0] if alone else process.pid, number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert err.count("error: the ps was stopped by SIGTERM") == bool(alone), err
    step = read(run_dir).steps[-1].step
    assert read(run_dir).checkpoints[-1].step == step
    done = shoal("train", job_file, "--nproc", 1, "--set", f"train.steps={step + 2}")
    assert done.code == 0 and read(run_dir).steps[-1].step == step + 2


def reached(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Returns once the run has trained `step` steps."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        path = run_dir / "metrics.jsonl"
        if path.exists() and (steps := read(run_dir).steps) and steps[-1].step >= step:
            return
        time.sleep(0.2)
    raise AssertionError(f"step {step} was not reached")
