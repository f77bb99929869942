"""`shoal jobs` with a real Slurm and a real Ray, on this host: a job trains, is stopped, and goes on."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from shoal.jobs.cluster.backend import Submitted, backend, find, submit
from shoal.jobs.cluster.request import read_request
from shoal.report.metrics import read_metrics
from tests.cli.conftest import JOB
from tests.launch.packages import modules, wheel

pytestmark = pytest.mark.matrix
SECONDS = 120.0


@pytest.fixture
def job_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a job of two ranks that trains in a moment, with more lines at its end; returns its file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "corpus").mkdir()
    for number in range(20):
        text = "\n".join(f"{number} + {i} = {number + i}" for i in range(40))
        (tmp_path / f"corpus/{number:02}.txt").write_text(text)

    def write(lines: str) -> Path:
        path = tmp_path / "job.toml"
        path.write_text(f"{JOB.format(corpus=tmp_path / 'corpus', run_dir=tmp_path / 'run')}{lines}\n")
        return path

    return write


def until(what: str, seen: Callable[[], bool], job: Submitted) -> None:
    deadline = time.monotonic() + SECONDS
    while not seen():
        asked = backend(job.backend)
        assert time.monotonic() < deadline and asked.state(job).word != "failed", (
            f"{what}: {asked.state(job)}\n{asked.log(job)}"
        )
        time.sleep(0.3)


def steps(run_dir: Path) -> int:
    record = run_dir / "metrics.jsonl"
    return len(read_metrics(record).steps) if record.exists() else 0


def train_stop_and_go_on(file: Path, on: str) -> None:
    first = submit(read_request(file, ["train.steps=1000000"]), on)
    until("it trains", lambda: steps(first.run_dir) > 5, first)
    assert backend(on).state(first).word == "runs" and "the first step" in backend(on).log(first)
    backend(on).stop(first)
    until("it stops", lambda: backend(on).state(first).word == "stopped", first)
    records = read_metrics(first.run_dir / "metrics.jsonl")
    assert records.end is not None and records.end.reason == "stopped by SIGTERM"
    assert records.run is not None and records.run.world == 2
    total = records.checkpoints[-1].step + 3
    second = submit(read_request(file, [f"train.steps={total}"]), on)
    assert find(first.run_dir) == second
    until("it ends", lambda: not backend(on).state(second).goes_on, second)
    assert backend(on).state(second).word == "ended", backend(on).log(second)
    records = read_metrics(first.run_dir / "metrics.jsonl")
    assert (records.steps[-1].step, records.attempts) == (total, 2)
    assert any("ended" in event.text or "SUCCEEDED" in event.text for event in backend(on).events(second))


def test_slurm(job_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = pytest.importorskip("tests.launch.slurm")
    (tmp_path / "slurm").mkdir()
    with slurm.cluster(tmp_path / "slurm") as cluster:
        for name, value in cluster.variables.items():
            monkeypatch.setenv(name, value)
        train_stop_and_go_on(job_of('nproc = 1\n[cluster]\nnodes = 2\ncpus = 1\nsetup = ["set -u"]'), "slurm")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray of two nodes with one CPU each, with its job server, at ports of its own. It asks for a token."""
    folder = wheel("ray[default]")
    known = os.environ.get("PYTHONPATH", "")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PYTHONPATH": f"{modules(folder)}{os.pathsep}{known}", "PATH": path}
    for name, value in {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}.items():
        environ[name] = value
        monkeypatch.setenv(name, value)
    with ExitStack() as running:
        probes = [running.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        ports = [probe.getsockname()[1] for probe in probes]
        names = ("port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port")
        given = [f"--{name}={port}" for name, port in zip(names, ports, strict=True)]
        here = ("--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", "--include-dashboard=true")
        scratch = running.enter_context(tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True))
        node = ("--block", "--disable-usage-stats", "--num-cpus=1", "--object-store-memory=100000000", here[0])
        for probe in probes:
            probe.close()

        def start(*options: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, str(folder / "bin/ray"), "start", *node, *options]
            process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            running.callback(_end, psutil.Process(process.pid))
            return process

        process = start("--head", *given, *here[1:], f"--temp-dir={scratch}")
        monkeypatch.setattr(sys, "path", [*sys.path, modules(folder)])  # last, so that what is installed wins
        monkeypatch.setenv("RAY_ADDRESS", f"http://127.0.0.1:{ports[1]}")
        deadline = time.monotonic() + SECONDS
        while socket.socket().connect_ex(("127.0.0.1", ports[1])):
            assert time.monotonic() < deadline and process.poll() is None, "Ray did not come up"
            time.sleep(0.2)
        start(f"--address=127.0.0.1:{ports[0]}", "--dashboard-agent-listen-port=0")
        yield


def _end(process: psutil.Process) -> None:
    """Ends a process and all that it started."""
    family = [process, *process.children(recursive=True)]
    process.terminate()
    for each in psutil.wait_procs(family, timeout=20)[1]:
        each.kill()


def test_ray(ray: None, job_of) -> None:
    train_stop_and_go_on(job_of("nproc = 1\n[cluster]\nnodes = 2\ncpus = 1"), "ray")
