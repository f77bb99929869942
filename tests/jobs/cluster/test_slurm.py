"""Jobs of Slurm, against commands that answer as its manual pages and a 22.05 say."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import UserError
from shoal.jobs.cluster.backend import State, Submitted, backend, find, submit
from shoal.report.events import Event

pytestmark = pytest.mark.fast
Put = Callable[[str, str], None]

UNKNOWN = 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1'
NO_ACCOUNTS = 'echo "Slurm accounting storage is disabled" >&2; exit 1'
SHOWN = (
    "JobId=4242 JobName=my job UserId=me(1000) GroupId=me(1000) MCS_label=N/A Priority=1 JobState=FAILED "
    "Reason=NonZeroExitCode Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=5:0 RunTime=00:00:03 "
    "SubmitTime=2026-11-20T10:00:00 EligibleTime=2026-11-20T10:00:00 StartTime=2026-11-20T10:00:01 "
    "EndTime=2026-11-20T10:00:04 Deadline=N/A Partition=gpu NodeList=n[1-2] BatchHost=n1 NumNodes=2"
)


@pytest.fixture
def job(tmp_path: Path) -> Submitted:
    return Submitted("slurm", "4242", "my-job", tmp_path, 0.0, {"log": "slurm-4242.out"})


def test_a_job_is_submitted_and_its_directory_knows_it(request_of, commands: Put, tmp_path: Path) -> None:
    commands("sbatch", f'printf "%s\\n" "$@" > {tmp_path}/asked; echo "4242;alpha"')
    request = replace(request_of(), run_dir=tmp_path / "run")
    done = submit(request, "slurm")
    assert (done.number, done.about) == ("4242", {"log": "slurm-4242.out", "cluster": "alpha"})
    assert find(tmp_path / "run") == done
    assert (tmp_path / "asked").read_text().splitlines() == ["--parsable", str(tmp_path / "run/logs/job.sbatch")]
    script = (tmp_path / "run/logs/job.sbatch").read_text()
    assert f"shoal train {tmp_path}/run/job.toml " in script  # the copy, which later changes do not reach
    assert (tmp_path / "run/job.toml").read_text() == request.file.read_text()
    commands("squeue", 'echo "4242|PENDING|Resources"')
    with pytest.raises(UserError, match=r"has the job 4242 of slurm, which waits: stop it by `shoal jobs stop"):
        submit(request, "slurm")
    commands("squeue", 'echo "4242|COMPLETED|None"')
    commands("sbatch", "echo 4243")
    assert submit(request, "slurm").number == "4243"


def test_an_answer_that_is_no_number(request_of, commands: Put, tmp_path: Path) -> None:
    commands("sbatch", 'echo "welcome to the cluster"; echo "hold on"')
    with pytest.raises(UserError, match="sbatch did not say the job's number"):
        submit(replace(request_of(), run_dir=tmp_path / "run"), "slurm")


@pytest.mark.parametrize(
    ("squeue", "sacct", "state"),
    [
        ("4242|PENDING|Priority", "", State("waits", "PENDING, Priority")),
        ("4242|RUNNING|None", "", State("runs", "RUNNING")),
        ("4242|COMPLETING|None", "", State("runs", "COMPLETING")),
        ("4242|COMPLETED|None", "", State("ended", "COMPLETED")),
        ("4242|CANCELLED|None", "", State("stopped", "CANCELLED")),
        ("4242|TIMEOUT|TimeLimit", "", State("failed", "TIMEOUT, TimeLimit")),
        ("4242|NODE_FAIL|a|b", "", State("failed", "NODE_FAIL, a|b")),
        ("", "4242|COMPLETED|0:0", State("ended", "COMPLETED, exit code 0:0")),
        ("", "4242|CANCELLED by 1000|0:15", State("stopped", "CANCELLED by 1000, exit code 0:15")),
        ("", "4242|REQUEUED|0:0\n4242|FAILED|5:0", State("failed", "FAILED, exit code 5:0")),
        ("", "42|COMPLETED|0:0", State("lost", "Slurm does not know it any more")),
        ("", "", State("lost", "Slurm does not know it any more")),
    ],
)
def test_states(job: Submitted, commands: Put, squeue: str, sacct: str, state: State) -> None:
    commands("squeue", f"printf '%s\\n' '{squeue}'")
    commands("sacct", f"printf '%s\\n' '{sacct}'")
    assert backend("slurm").state(job) == state


def test_a_site_without_accounts_and_a_job_that_is_gone(job: Submitted, commands: Put) -> None:
    commands("squeue", UNKNOWN)
    commands("sacct", NO_ACCOUNTS)
    commands("scontrol", UNKNOWN)
    assert backend("slurm").state(job).word == "lost"
    assert backend("slurm").events(job) == []


def test_the_life_of_a_job(job: Submitted, commands: Put) -> None:
    commands("scontrol", f"echo '{SHOWN}'")
    begun = time.mktime(time.strptime("2026-11-20T10:00:00", "%Y-%m-%dT%H:%M:%S"))
    assert backend("slurm").events(job) == [
        Event(begun, None, "Slurm: job 4242 submitted"),
        Event(begun + 1, None, "Slurm: job 4242 started on n[1-2]"),
        Event(begun + 4, None, "Slurm: job 4242 ended: FAILED, exit code 5:0", bad=True),
    ]
    later = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 3600))
    waits = SHOWN.replace("StartTime=2026-11-20T10:00:01", "StartTime=Unknown").replace("2026-11-20T10:00:04", later)
    commands("scontrol", f"echo '{waits}'")
    assert [event.text for event in backend("slurm").events(job)] == ["Slurm: job 4242 submitted"]


def test_output_and_end(job: Submitted, commands: Put, tmp_path: Path) -> None:
    assert backend("slurm").log(job) == ""
    job.log.parent.mkdir()
    job.log.write_bytes(b"step 1\n\xff\n")
    assert backend("slurm").log(job) == "step 1\n�\n"
    commands("scancel", f'echo "$@" > {tmp_path}/asked')
    backend("slurm").stop(replace(job, about={"cluster": "alpha"}))
    assert (tmp_path / "asked").read_text() == "--clusters=alpha 4242\n"


def test_what_slurm_says_is_said(job: Submitted, commands: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    commands("scancel", 'echo "scancel: error: Kill job error on job id 4242: Access/permission denied" >&2; exit 1')
    with pytest.raises(UserError, match=r"scancel failed: .*permission denied"):
        backend("slurm").stop(job)
    monkeypatch.setattr("shoal.jobs.cluster.slurm._SECONDS", 0.2)
    commands("squeue", "exec sleep 10")
    with pytest.raises(UserError, match=r"squeue did not answer within 0.2 s: look whether slurmctld runs"):
        backend("slurm").state(job)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"sbatch is not here|squeue is not here"):
        backend("slurm").state(job)
