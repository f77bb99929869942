"""`shoal jobs` from end to end: a job file is submitted, listed, read, stopped, and goes on; what a mistake says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from shoal.jobs.cluster import pods
from shoal.jobs.cluster.backend import NAME, backend, find
from shoal.jobs.cluster.kubernetes import indexed_job
from shoal.jobs.cluster.request import read_request
from shoal.report.metrics import read_metrics

SECONDS = 90.0


def wait_for_step(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + SECONDS
    record = run_dir / "metrics.jsonl"
    while not record.exists() or len(read_metrics(record).steps) < step:
        log = run_dir / "logs/job.log"
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "nothing was said"
        time.sleep(0.1)


def ended(run_dir: Path) -> str:
    job = find(run_dir)
    deadline = time.monotonic() + SECONDS
    while (state := backend(job.backend).state(job)).goes_on:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return state.word


def test_a_job_here_from_its_file_to_its_end(shoal, start, job_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = ("--set", "train.steps=1000000", "--set", "run.nproc=1", "--set", "data.validation=0.0")
    submitted = start("jobs", "submit", job_file, *first)
    assert submitted.communicate(timeout=SECONDS)[0] == f"{run_dir}\n"
    wait_for_step(run_dir, 3)
    (line,) = shoal("jobs", "ls", tmp_path).out.splitlines()[1:]
    assert line.startswith(f"{run_dir}  local  ") and "  runs  " in line
    assert "trains" in shoal("top", run_dir).out
    refused = shoal("jobs", "submit", job_file, *first)
    assert refused.code == 2 and f"stop it by `shoal jobs stop {run_dir}`" in refused.err
    assert shoal("jobs", "stop", run_dir).code == 0
    assert ended(run_dir) == "stopped"
    steps = read_metrics(run_dir / "metrics.jsonl").steps[-1].step
    log = shoal("jobs", "logs", run_dir, "--follow").out
    assert log.startswith(f"{run_dir}/job.toml: importing torch") and log.endswith(f"report: {run_dir}/report.html\n")
    events = shoal("jobs", "events", run_dir).out
    assert "submitted to local as " in events and f"step {steps:<6} ends: stopped by SIGTERM" in events
    assert events.splitlines()[-1].endswith("the job stopped: exit code 143")
    answer = shoal("jobs", "stop", run_dir)
    assert answer.code == 2 and "does not run: stopped, exit code 143" in answer.err


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["render", "{job}", "--for", "slum"], "there is no such target. Targets: local, slurm, ray, kubernetes"),
        (["render", "nowhere.toml", "--for", "slurm"], "no such job file: nowhere.toml"),
        (["render", "{job}", "--for", "kubernetes"], "cluster.image is missing"),
        (["render", "{job}", "--for", "slurm", "--set", "cluster.nods=2"], 'Did you mean "nodes"?'),
        (["submit", "{job}", "--on", "slrum"], "there is no such backend. Backends: local, slurm, ray"),
        (["submit", "{job}", "--on", "slurm"], "sbatch is not here"),
        (["submit", "{job}", "--set", "cluster.nodes=2"], "give --set cluster.nodes=1"),
        (["logs", "/nowhere"], "no such directory: /nowhere"),
        (["stop", "/"], "no job was submitted there"),
        (["events", "/"], "no job was submitted there"),
        (["ls", "/nowhere"], "no such directory: /nowhere"),
    ],
)
def test_a_mistake_is_its_message_alone(shoal, job_file: Path, monkeypatch, arguments: list[str], message: str) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    answer = shoal("jobs", *[argument.format(job=job_file) for argument in arguments])
    assert answer.code == 2 and answer.err.startswith("error: ") and message in answer.err
    assert not (job_file.parent / "run").exists()


@pytest.mark.fast
def test_yaml_on_stdout_and_what_it_needs_on_stderr(shoal, job_file: Path) -> None:
    values = ("cluster.image=lab/shoal", 'cluster.volumes={training = "/data"}', "run.dir=/data/run")
    answer = shoal(
        "jobs", "render", job_file, "--for", "jobset", *(each for value in values for each in ("--set", value))
    )
    assert [each["kind"] for each in yaml.safe_load_all(answer.out)] == ["ConfigMap", "JobSet"]
    assert answer.err.startswith("# the pods read a Secret, made once by: kubectl create secret generic job ")


@pytest.mark.fast
def test_a_list_goes_on_where_a_scheduler_does_not_answer(shoal, tmp_path: Path, monkeypatch) -> None:
    assert shoal("jobs", "ls", tmp_path).out == f"no job was submitted in {tmp_path}\n"
    monkeypatch.setenv("PATH", "/nowhere")
    jobs = {"a": ("slurm", {"log": "x"}), "b": ("local", {"host": "elsewhere", "started": "0", "log": "x"})}
    for number, (name, (on, about)) in enumerate(jobs.items()):
        (tmp_path / name).mkdir()
        record = {"backend": on, "number": "7", "name": name, "run_dir": "", "time": number, "about": about}
        (tmp_path / name / NAME).write_text(json.dumps(record))
    first, second = shoal("jobs", "ls", tmp_path).out.splitlines()[1:]
    assert "unknown" in first and "squeue is not here" in first
    assert "unknown" in second and "it is on elsewhere" in second


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_containers_of_two_pods_train_together(job_file: Path, tmp_path: Path, ranks: int) -> None:
    """Each pod is a process here with the command and the variables of its container; both are on this host."""
    values = [f"run.nproc={ranks}", "cluster.nodes=2", 'cluster.image="x"', f'cluster.volumes={{a = "{tmp_path}"}}']
    documents = indexed_job(read_request(job_file, values))
    (container,) = documents[-1]["spec"]["template"]["spec"]["containers"]
    (tmp_path / "mounted").mkdir()
    (tmp_path / "mounted/job.toml").write_text(documents[0]["data"]["job.toml"])
    command = [part.replace(pods.FOLDER, str(tmp_path / "mounted")) for part in container["command"]]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    replaced = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = []
    for index in range(2):
        given = {each["name"]: each.get("value", str(index)) for each in container["env"]}
        given |= {name: replaced[name.removeprefix("PET_")] for name in given if name.removeprefix("PET_") in replaced}
        given["SHOAL_SECRET"] = "that of the Secret in the cluster"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environ = {**os.environ, **given, "PATH": path, "JOB_COMPLETION_INDEX": str(index), "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True))
    for process in started:
        assert process.wait(SECONDS) == 0, process.communicate()[1]
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    assert records.run is not None and records.run.world == 2 * ranks and records.steps[-1].step == 6
