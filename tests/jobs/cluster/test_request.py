"""What a job file asks a scheduler for, in our words and in Cloud-ML's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import UserError
from shoal.jobs.cluster.request import name_of, read_request
from shoal.jobs.cluster.table import Cluster
from shoal.jobs.config import tables
from shoal.jobs.read import load_job
from shoal.jobs.write import to_toml
from shoal.launch.environment import MARKS

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("time", "seconds"),
    [(90, 90), ("90", 90), ("1.5h", 5400), ("90m", 5400), ("2d", 172800), ("12:00:00", 43200), ("1-01:00:01", 90001)],
)
def test_times(time: str | int, seconds: int) -> None:
    assert Cluster(time=time).seconds == seconds


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"time": "soon"}, "cluster.time = 'soon': give seconds, \"90m\""),
        ({"time": "12:00"}, "cluster.time = '12:00'"),
        ({"time": 0}, "cluster.time = 0"),
        ({"time": "9" * 400}, "cluster.time = '999"),
        ({"time": 10**400}, "cluster.time = 1000"),
        ({"nodes": 0}, "cluster.nodes = 0: give at least 1"),
        ({"nodes": 10**9}, "cluster.nodes = 1000000000: give at least 1 and at most 1048576"),
        ({"gpus": 5000}, "cluster.gpus = 5000: give at least 1 and at most 4096"),
        ({"gpus": 0}, "cluster.gpus = 0: give at least 1"),
        ({"nodes": 2, "least": 3}, "cluster.least = 3: give a number from 1 to cluster.nodes = 2"),
        ({"cpus": 0.0}, "cluster.cpus = 0.0: give a number above 0"),
        ({"memory": "lots"}, "cluster.memory = 'lots': give bytes"),
        ({"memory": "1B"}, 'give at least "1MiB"'),
        ({"env": {"A": 1}}, 'cluster.env.A = 1: give a text, "1"'),
        ({"env": {"A B": "1"}}, "'A B' is no name of an environment variable"),
        ({"env": {"RANK": "0"}}, "cluster.env.RANK: by this variable a rank knows itself"),
        ({"env": {"SHOAL_SECRET": "s" * 32}}, "cluster.env.SHOAL_SECRET: it would be written into"),
        ({"volumes": {"claim": "data"}}, "give the path where it is mounted"),
        ({"options": ["account=lab"]}, "is no option of sbatch"),
        ({"options": ["--account=lab\nrm -r /"]}, "is no option of sbatch"),
    ],
)
def test_a_wrong_table_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Cluster(**table)
    assert message in str(caught.value)


def test_no_variable_that_makes_a_process_a_rank_is_set_for_all() -> None:
    for name in MARKS:
        with pytest.raises(UserError, match=f"cluster.env.{name}: "):
            Cluster(env={name: "1"})
    Cluster(env={"PET_MAX_RESTARTS": "3", "NCCL_DEBUG": "INFO", "MASTER_PORT": "29501"})


def test_a_job_asks_for_its_ranks_and_its_directory(job_file: Path) -> None:
    request = read_request(job_file, ["train.lr=1e-3"])
    assert (request.name, request.ranks, request.cluster.hosts) == ("my-job", 2, 2)
    assert request.rank() == ["shoal", "train", str(job_file), "--set", "train.lr=1e-3"]
    assert request.record == Path("/data/runs/first")
    job_file.write_text('model = {name = "gpt", preset = "1m"}\ntrain = {steps = 1}\n')
    short = read_request(job_file)
    assert short.ranks == 1 and short.record == job_file.parent / "runs/My job"
    assert short.host()[3:] == ["--set", 'run.dir="runs/My job"', "--nproc", "1"]
    assert read_request(job_file, ["cluster.gpus=4"]).ranks == 4
    assert read_request(job_file, ["plan.tp=4", "cluster.nodes=2"]).ranks == 2


def test_a_plan_that_does_not_fit_is_refused_before_it_waits(job_file: Path) -> None:
    with pytest.raises(UserError, match=r"cluster\.nodes = 1000000 with 2 ranks each .* are 2000000 .* fewer nodes"):
        read_request(job_file, ["cluster.nodes=1000000", "plan.dp=2"])
    with pytest.raises(UserError, match=r"plan\.dp = 3|dp = 4 works"):
        read_request(job_file, ["plan.dp=3"])


def test_the_table_stays_with_the_run_and_an_absent_one_leaves_no_trace(job_file: Path) -> None:
    job, origins = load_job(job_file)
    again = job_file.with_name("resolved.toml")
    again.write_text(to_toml(job, origins))
    assert load_job(again)[0].cluster == job.cluster
    job_file.write_text('model = {name = "gpt", preset = "1m"}\ntrain = {steps = 1}\n')
    job, origins = load_job(job_file)
    assert tables(job)["cluster"] == {} and "cluster" not in to_toml(job, origins)


@pytest.mark.parametrize(
    ("text", "name"),
    [("GPT_2 run", "gpt-2-run"), ("7b", "job-7b"), ("--", "job"), ("x" * 60, "x" * 40), ("Größe", "gr-e")],
)
def test_names_that_schedulers_take(text: str, name: str) -> None:
    assert name_of(text) == name


FIELDS = {
    "job_name": "mnist",
    "module_name": "trainer.task",
    "job_args": "--steps 100 --note 'two words'",
    "cpu_limit": "4.5",
    "memory_limit": "10G",
    "gpu_limit": 2,
    "ps_count": 1,
    "worker_count": "3",
    "docker_image": "lab/trainer",
    "prepare_command": "pip install -r requirements.txt",
    "finish_command": "echo done",
}


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_cloudml_fields(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"job.{suffix}"
    toml = "".join(f"{key} = {json.dumps(value)}\n" for key, value in FIELDS.items())
    path.write_text(json.dumps(FIELDS) if suffix == "json" else toml)
    request = read_request(path)
    assert request.module == ("trainer.task", "--steps", "100", "--note", "two words")
    assert (request.name, request.ranks, request.parameter_servers, request.run_dir) == (
        "mnist",
        2,
        1,
        Path("runs/mnist"),
    )
    assert request.cluster == Cluster(
        nodes=3,
        cpus=4.5,
        memory=10**10,
        gpus=2,
        image="lab/trainer",
        setup=["pip install -r requirements.txt"],
        finish=["echo done"],
    )
    assert request.rank() == ["python", "-m", *request.module]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"job_name": None}, '"job_name" is missing'),
        ({"module_name": ""}, '"module_name" is missing'),
        ({"module_name": "trainer; rm"}, "is no name of a module"),
        ({"job_args": "'open"}, "is no line of arguments"),
        ({"job_args": 3}, "is no line of arguments"),
        ({"cpu_limit": "many"}, "give a number of cores"),
        ({"cpu_limit": "0"}, "give a number of cores"),
        ({"memory_limit": "10"}, "give a number with K, M or G"),
        ({"memory_limit": "1K"}, "at least 2M"),
        ({"memory_limit": "9" * 400 + "G"}, "give a number with K, M or G"),
        ({"cpu_limit": "9" * 400}, "give a number of cores"),
        ({"gpu_limit": "9" * 5000}, "give a whole number from 1 to 4096"),
        ({"gpu_limit": 0}, "give a whole number from 1 to 4096"),
        ({"worker_count": True}, "give a whole number from 1 to 1048576"),
        ({"worker_count": 10**9 - 1}, "worker_count = 999999999: give a whole number from 1 to 1048576"),
        ({"prepare_command": ""}, "prepare_command = '': give a text"),
        ({"worker_cuont": 2}, 'there is no field "worker_cuont". Did you mean "worker_count"?'),
        ({"trainer_uri": "https://a/b.tar.gz"}, "install the package in prepare_command"),
        ({"volume_path": "/a"}, "add it to the document that `shoal jobs render` prints"),
    ],
)
def test_wrong_cloudml_fields_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**FIELDS, **change}))
    with pytest.raises(UserError) as caught:
        read_request(path)
    assert message in str(caught.value)


def test_files_that_are_no_job(tmp_path: Path) -> None:
    for name, text, message in (
        ("a.json", None, "no such job file"),
        ("b.json", "[]", "no JSON object"),
        ("c.json", "{", "read"),
        ("d.json", '{"model": {"name": "gpt"}}', "no field of Cloud-ML's .* a job file of Shoal is TOML"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=message):
            read_request(tmp_path / name)
    (tmp_path / "job.json").write_text(json.dumps(FIELDS))
    with pytest.raises(UserError, match="no values of a job to replace"):
        read_request(tmp_path / "job.json", ["train.lr=1"])
