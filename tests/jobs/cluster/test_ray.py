"""Jobs of Ray, against a client that answers as the source of ray 2.60 says."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from shoal.errors import UserError
from shoal.jobs.cluster.backend import State, Submitted, backend, submit
from shoal.jobs.cluster.ray_job import specification
from shoal.report.events import Event

pytestmark = pytest.mark.fast


class JobStatus(StrEnum):
    PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED = "PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"


@dataclass
class JobDetails:
    status: JobStatus
    message: str | None = None
    start_time: int | None = None
    end_time: int | None = None


class AuthenticationError(Exception):
    """The token is missing or wrong; as the others of Ray's errors, no RuntimeError."""


@dataclass
class JobSubmissionClient:
    """A job server with the jobs of `known`."""

    address: str
    known: ClassVar[dict[str, JobDetails]] = {}
    asked: ClassVar[list[Any]] = []
    fails: ClassVar[Exception | None] = None

    def __post_init__(self) -> None:
        if self.fails is not None:
            raise self.fails

    def submit_job(
        self,
        *,
        entrypoint: str,
        submission_id: str,
        runtime_env: dict[str, Any],
        metadata: dict[str, str],
        **resources: float,
    ) -> str:
        assert runtime_env["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "120"
        assert set(resources) <= {"entrypoint_num_cpus", "entrypoint_num_gpus", "entrypoint_memory"}
        if "bad" in entrypoint:
            raise RuntimeError("Request failed with status code 500: Traceback ...\nValueError: bad.")
        self.known[submission_id] = JobDetails(JobStatus.PENDING, "Job has not started yet.")
        self.asked.append((self.address, entrypoint, metadata))
        return submission_id

    def get_job_info(self, job_id: str) -> JobDetails:
        if job_id not in self.known:
            raise RuntimeError(f"Request failed with status code 404: Job {job_id} does not exist.")
        return self.known[job_id]

    def get_job_logs(self, job_id: str) -> str:
        self.get_job_info(job_id)
        return "step 1\n"

    def stop_job(self, job_id: str) -> bool:
        self.get_job_info(job_id).status = JobStatus.STOPPED
        return True


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> type[JobSubmissionClient]:
    package = ModuleType("ray")
    monkeypatch.setitem(sys.modules, "ray", package)
    for name, member in (("job_submission", JobSubmissionClient), ("exceptions", AuthenticationError)):
        module = ModuleType(f"ray.{name}")
        module.__dict__[member.__name__] = member
        package.__dict__[name] = module
        monkeypatch.setitem(sys.modules, f"ray.{name}", module)
    for name, value in (("known", {}), ("asked", []), ("fails", None)):
        monkeypatch.setattr(JobSubmissionClient, name, value)
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    return JobSubmissionClient


@pytest.fixture
def job(ray, request_of, tmp_path: Path) -> Submitted:
    return submit(replace(request_of(nodes=1), run_dir=tmp_path / "run"), "ray")


def test_a_job_is_submitted(job: Submitted, ray, tmp_path: Path) -> None:
    ((address, entrypoint, metadata),) = ray.asked
    assert address == job.about["address"] == "http://head:8265"
    assert f"shoal train {tmp_path}/run/job.toml" in entrypoint
    assert metadata == {"job_name": "my-job", "run_dir": str(tmp_path / "run")}
    assert backend("ray").state(job) == State("waits", "Job has not started yet.")
    assert backend("ray").log(job) == "step 1\n"


@pytest.mark.parametrize("value", ["$HOME/data", "a${HOME}b", "$HOME", "${", "$5, a$ and $(date)"])
def test_a_value_that_ray_would_change_is_refused_where_other_hosts_get_it(request_of, value: str) -> None:
    found = request_of(env=f"{{ODD = '{value}'}}")
    if "HOME" in value:
        with pytest.raises(UserError, match=r"cluster.env.ODD = .*: Ray puts a variable of each host in place of \$"):
            specification(found)
    else:
        assert specification(found)["runtime_env"]["env_vars"]["ODD"] == value
    alone = replace(found, module=("m",), cluster=replace(found.cluster, nodes=1))
    assert f"\nexport ODD={shlex.quote(value)}\n" in shlex.split(specification(alone)["entrypoint"])[-1]


@pytest.mark.parametrize(
    ("status", "word"), [("RUNNING", "runs"), ("SUCCEEDED", "ended"), ("FAILED", "failed"), ("STOPPED", "stopped")]
)
def test_states(job: Submitted, ray, status: str, word: str) -> None:
    said = "Job\nsaid so., last available logs (truncated to 20,000 chars):\nstep 1"
    ray.known[job.number] = JobDetails(JobStatus(status), said, 1_000, 2_000)
    assert backend("ray").state(job) == State(word, "Job said so.")
    assert backend("ray").events(job) == [
        Event(1.0, None, f"Ray: {job.number} started"),
        Event(2.0, None, f"Ray: {job.number} {status}", status == "FAILED"),
    ]


def test_a_job_is_stopped(job: Submitted) -> None:
    backend("ray").stop(job)
    assert backend("ray").state(job).word == "stopped"


def test_a_cluster_that_began_anew(job: Submitted, ray) -> None:
    ray.known.clear()
    assert backend("ray").state(job) == State("lost", "this cluster does not know it")
    assert backend("ray").events(job) == []
    with pytest.raises(UserError, match=r"does not know this job.*Submit it again"):
        backend("ray").log(job)


def test_what_is_missing_is_said(
    job: Submitted, ray, request_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"refuses: Request failed with status code 500: Traceback ...$"):
        submit(replace(request_of(nodes=1, setup='["bad"]'), run_dir=tmp_path / "other"), "ray")
    monkeypatch.setattr(ray, "fails", ConnectionError("Failed to connect to Ray"))
    with pytest.raises(UserError, match="there is no job server of Ray at http://head:8265: `ray start --head`"):
        backend("ray").state(job)
    monkeypatch.setattr(ray, "fails", AuthenticationError("Authentication required: Unauthorized\n\nEnsure ..."))
    with pytest.raises(UserError, match=r"head:8265 asks for a token: set RAY_AUTH_MODE=token, .*: Unauthorized\)$"):
        backend("ray").state(job)
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    with pytest.raises(UserError, match=r"pip install 'ray\[default\]'"):
        backend("ray").state(job)
