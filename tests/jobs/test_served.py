"""A job with a parameter server and workers: what it computes, what is refused, and who may die."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from shoal.checkpoint.pieces import Want
from shoal.checkpoint.reader import load, tensor_shapes
from shoal.data import Cursor
from shoal.errors import UserError
from shoal.jobs.choose import Sizes, settle
from shoal.jobs.read import parse_job
from shoal.jobs.served.follow import follow
from shoal.jobs.served.policy import policy_of, samples_of
from shoal.jobs.served.serve import serve
from shoal.jobs.served.settings import check_served
from shoal.jobs.served.several import share_of
from shoal.jobs.served.tables import tables_of
from shoal.jobs.served.worker import work
from shoal.jobs.train import train
from shoal.launch.identity import Identity
from shoal.launch.tf_config import local_cluster
from shoal.report.metrics import RunRecords, read_metrics
from shoal.server import Async, Batch, BoundedStaleness, Sync

pytestmark = pytest.mark.usefixtures("quick")
SECRET = "a secret of these tests"


def tables(run_dir: Path, policy: str = "sync", **train: object) -> dict[str, dict[str, object]]:
    return {
        "model": {"name": "mlp", "sizes": [2, 16, 3]},
        "data": {"source": "spirals"},
        "train": {"steps": 6, "global_batch": 63, "lr": 1e-2, **train},
        "server": {"policy": policy},
        "run": {"dir": str(run_dir), "trackers": [], "eval_every": 3},
    }


def run(
    run_dir: Path, workers: int, policy: str, of: dict[str, object] | None = None, ps: int = 1, **more: object
) -> RunRecords:
    """Trains with servers and workers that are threads of this process."""
    addresses = tuple(local_cluster({"ps": ps})["ps"])
    job, origins = parse_job({**tables(run_dir, policy, **more), **(of or {})})
    failures: list[BaseException] = []

    def part(of, place: Identity) -> None:
        try:
            of(job, origins, place)
        except BaseException as error:
            failures.append(error)

    places = [Identity(rank, workers, None, None, "", 0, "test", servers=addresses) for rank in range(workers)]
    servers = [Identity(0, workers, 0, 1, "", 0, "test", servers=addresses, serves=each) for each in range(ps)]
    threads = [threading.Thread(target=part, args=(follow if each.serves else serve, each)) for each in servers]
    threads += [threading.Thread(target=part, args=(work, place)) for place in places]
    for thread in threads[:ps]:
        thread.start()
    until = time.monotonic() + 60.0
    saved = run_dir / "checkpoints"
    while not any(saved.glob("step-????????")) and not failures and time.monotonic() < until:
        time.sleep(0.01)  # weights of several engines that are built at once would draw from one generator
    for thread in threads[ps:]:
        thread.start()
    for thread in threads:
        thread.join(120)
    if failures:
        raise failures[0]
    return read_metrics(run_dir / "metrics.jsonl")


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("SHOAL_SECRET", SECRET)


def test_sync_trains_as_ranks_that_average_and_any_plan_goes_on(tmp_path):
    alone, origins = parse_job(tables(tmp_path / "alone"))
    train(alone, origins)
    expected, found = read_metrics(tmp_path / "alone/metrics.jsonl"), run(tmp_path / "served", 2, "sync")
    assert [each.step for each in found.steps] == list(range(1, 7))
    for one, other in zip(expected.steps, found.steps, strict=True):
        assert (one.tokens, one.lr) == (other.tokens, pytest.approx(other.lr))
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    assert [each.step for each in found.evals] == [0, 3, 6]
    assert found.evals[-1].loss == pytest.approx(expected.evals[-1].loss, rel=1e-5)
    assert found.end is not None and found.end.reason == "all 6 steps were trained"
    last = found.servers[-1]
    assert (last.pushes, last.dropped, last.lags) == (12, 0, {"0": 12})
    more, origins = parse_job(tables(tmp_path / "served", steps=8))
    train(more, origins)
    assert read_metrics(tmp_path / "served/metrics.jsonl").resumed == (6,)


def test_several_servers_train_to_the_bit_as_one_and_any_number_goes_on(tmp_path):
    """Clipped by the norm of the whole gradient; resumed in the middle of an epoch, also by ranks."""
    some = {"clip": 0.05, "schedule": "cosine", "warmup": 2, "precision": "bf16"}
    one, two = run(tmp_path / "one", 2, "sync", **some), run(tmp_path / "two", 2, "sync", ps=2, **some)
    assert [(each.loss, each.grad_norm, each.lr) for each in one.steps] == [
        (each.loss, each.grad_norm, each.lr) for each in two.steps
    ]
    assert min(each.grad_norm for each in two.steps) > 0.05
    assert one.run.parameters == two.run.parameters == sum(two.servers[-1].servers)
    saved = [values(tmp_path / each / "checkpoints/step-00000006") for each in ("one", "two")]
    assert saved[0].keys() == saved[1].keys() and all(torch.equal(saved[1][name], saved[0][name]) for name in saved[0])
    more = {**some, "steps": 9}
    alone, origins = parse_job(tables(tmp_path / "one", **more))
    train(alone, origins)
    for steps, ps in ((7, 3), (8, 2), (9, 1)):  # others have had what is in a server's folder
        assert run(tmp_path / "two", 2, "sync", ps=ps, **{**more, "steps": steps}).resumed[-1] == steps - 1
    expected = read_metrics(tmp_path / "one/metrics.jsonl").steps
    for mine, theirs in zip(read_metrics(tmp_path / "two/metrics.jsonl").steps[6:], expected[6:], strict=True):
        assert (mine.step, mine.tokens) == (theirs.step, theirs.tokens)
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-2)


def test_more_servers_than_parameters_are_refused(tmp_path):
    settled = settle(*parse_job(tables(tmp_path)), Sizes(1, 1))
    with pytest.raises(UserError, match=r"ps=5: the model has 4 parameters.*Give ps=1"):
        share_of(tables_of(settled), 0, 5)


def test_the_model_is_made_once_to_learn_its_tables_and_shares(tmp_path):
    settled, made = settle(*parse_job(tables(tmp_path)), Sizes(1, 1)), []
    counted = replace(settled.model, factory=lambda: made.append(settled.model.factory()) or made[-1])
    found = tables_of(replace(settled, model=counted))
    shares = [share_of(found, index, 3) for index in range(3)]
    assert len(made) == 1
    names = [name for share in shares for name, _ in share.factory().named_parameters()]
    assert sorted(names) == sorted(name for name, _ in made[0].named_parameters())


def test_statistics_of_batches_are_those_of_ranks(tmp_path):
    """Of a ResNet, under sync; an evaluation takes them from the server, and a checkpoint has them."""
    of = {"model": {"name": "resnet", "depth": 20}, "data": {"source": "shapes"}}
    some = {"steps": 2, "global_batch": 8, "microbatch": 4}
    alone, origins = parse_job({**tables(tmp_path / "alone", **some), **of})
    train(alone, origins)
    expected = read_metrics(tmp_path / "alone/metrics.jsonl")
    found = run(tmp_path / "served", 2, "sync", of=of, ps=2, **some)
    for one, other in zip(expected.steps, found.steps, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
    assert found.evals[-1].loss == pytest.approx(expected.evals[-1].loss, rel=1e-3)
    saved = [values(tmp_path / each / "checkpoints/step-00000002") for each in ("alone", "served")]
    assert saved[0].keys() == saved[1].keys() and any("running_var" in name for name in saved[0])
    for name, value in saved[0].items():
        torch.testing.assert_close(saved[1][name], value, rtol=1e-3, atol=1e-4)


def test_statistics_of_attempts_that_overflow_are_not_counted(tmp_path):
    """A worker makes a step anew under a smaller loss scale, with the same samples."""
    of = {"model": {"name": "resnet", "depth": 20}, "data": {"source": "shapes"}}
    of["run"] = {"dir": str(tmp_path), "trackers": [], "eval_samples": 4}
    precision = {"name": "fp16", "initial_scale_power": 22, "hysteresis": 1}
    run(tmp_path, 1, "sync", of=of, steps=1, global_batch=4, microbatch=2, precision=precision)
    found = values(tmp_path / "checkpoints/step-00000001")
    counts = {float(each) for name, each in found.items() if "num_batches_tracked" in name}
    assert counts == {2.0}


def values(path: Path) -> dict[str, torch.Tensor]:
    """Weights and buffers of a checkpoint."""
    into = {name: torch.zeros(shape) for name, shape in tensor_shapes(path).items() if not name.startswith("optim.")}
    load(path, [Want.whole(name, each) for name, each in into.items()])
    return into


def test_another_policy_and_other_workers_go_on_after_a_run_has_ended(tmp_path):
    run(tmp_path, 1, "batch:2")
    found = run(tmp_path, 2, "staleness:1", steps=9)
    assert [each.step for each in found.steps] == list(range(1, 10)) and found.resumed == (6,)
    assert max(map(int, found.servers[-1].staleness)) <= 2


def test_shares_of_a_step_are_its_global_batch():
    cursor = Cursor(100, 32, 0)
    for step in (0, 3):  # the epoch's last batch has 4 samples
        shares = [samples_of(cursor, 5 * step + share, 5) for share in range(5)]
        assert {each for each, _ in shares} == {step}
        assert [each for _, ids in shares for each in ids] == cursor.ids(step).tolist()


@pytest.mark.parametrize(
    "text, policy",
    [("sync", Sync(3)), ("async", Async()), ("batch:4", Batch(4)), ("staleness:0", BoundedStaleness(0))],
)
def test_policies_by_name(text, policy):
    assert policy_of(parse_job(tables(Path("x"), text))[0], 3) == policy


@pytest.mark.parametrize(
    "section, key, value, message",
    [
        ("server", "policy", "asinc", 'not one of async, sync, batch:k, staleness:s. Did you mean "async"'),
        ("server", "policy", "batch", 'give a number from 1 on after it, e.g. "batch:2"'),
        ("server", "policy", "batch:0", "give a number from 1 on"),
        ("server", "polici", "sync", 'unknown key "server.polici".*Did you mean "policy"'),
        ("server", "drop_above", 2, 'under server.policy = "sync" no gradient lags'),
        ("server", "scale", "invers", '"invers" is not one of none, inverse. Did you mean "inverse"'),
        ("server", "codec", "u9", 'server.codec: codec "u9" is not one of fp32'),
        ("server", "timeout", 0, "give seconds above 0"),
        ("plan", "tp", 2, "plan.tp = 2 with a parameter server.*Leave plan.tp out, or leave ps out of the roles"),
        ("plan", "zero", 1, "Leave plan.zero out"),
        ("plan", "name", "auto", 'plan = "auto" with a parameter server.*or leave ps out of the roles'),
        ("run", "verify_every", 5, "Leave run.verify_every out"),
        ("train", "global_batch", 2, "a step has 3 shares.*Give at least 3"),
    ],
)
def test_what_does_not_go_together_is_refused(section, key, value, message):
    content = tables(Path("x"))
    content.setdefault(section, {})[key] = value
    with pytest.raises(UserError, match=message):
        check_served(parse_job(content)[0], 3)


def command(job: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "shoal.cli", "train", str(job), "--roles", "ps=1,worker=3", *more]


def processes(launcher: int, role: str) -> list[psutil.Process]:
    """The processes of a role that have begun to train."""
    found = []
    for each in psutil.Process(launcher).children():
        try:
            task = json.loads(each.environ().get("TF_CONFIG", "{}")).get("task", {})
        except psutil.Error:
            continue
        found += [each] if task.get("type") == role else []
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("role", ["worker", "ps"])
def test_a_killed_task_is_started_again_and_no_step_is_lost(tmp_path, role):
    job = tmp_path / "job.toml"
    text = '[model]\nname = "mlp"\nsizes = [2, 512, 512, 3]\n[data]\nsource = "spirals"\n'
    text += f'[train]\nsteps = 4000\nglobal_batch = 64\n[server]\nrestarts = 40\n[run]\ndir = "{tmp_path}/run"\n'
    job.write_text(text + "trackers = []\n")
    launcher = subprocess.Popen(command(job, "--set", "server.policy=batch:2"), env={**os.environ})
    draw, kills = random.Random(1), 0
    while kills < 20 and launcher.poll() is None:
        time.sleep(1.0 + 5.0 * draw.random())
        if victims := processes(launcher.pid, role):
            draw.choice(victims).kill()
            kills += 1
    assert launcher.wait(600) == 0
    found = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [each.step for each in found.steps] == list(range(1, 4001))


@pytest.mark.matrix
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path, signum):
    job = tmp_path / "job.toml"
    text = '[model]\nname = "mlp"\nsizes = [2, 64, 3]\n[data]\nsource = "spirals"\n'
    job.write_text(text + f'[train]\nseconds = 600\n[run]\ndir = "{tmp_path}/run"\ntrackers = []\n')
    launcher = subprocess.Popen(command(job), env={**os.environ})
    metrics = tmp_path / "run/metrics.jsonl"
    until = time.monotonic() + 120
    while not (metrics.exists() and len(read_metrics(metrics).steps) > 20):
        assert time.monotonic() < until and launcher.poll() is None
        time.sleep(0.2)
    launcher.send_signal(signum)
    assert launcher.wait(100) == 128 + signum
    found = read_metrics(metrics)
    assert found.end is not None and found.end.reason == f"stopped by {signal.Signals(signum).name}"
    assert found.checkpoints[-1].step == found.steps[-1].step
