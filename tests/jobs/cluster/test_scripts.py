"""The scripts of a local run and of sbatch: run by bash, with commands of our own in place of shoal and srun."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import UserError
from shoal.jobs.cluster.ray_job import specification
from shoal.jobs.cluster.render import TARGETS, render
from shoal.jobs.cluster.request import Request
from shoal.jobs.cluster.script import local_script
from shoal.jobs.cluster.table import Cluster

pytestmark = pytest.mark.fast
Put = Callable[[str, str], None]


def bash(script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.sh"
    path.write_text(script)
    return subprocess.run(["bash", str(path)], capture_output=True, text=True, cwd=tmp_path, check=False)


def test_a_local_script_runs_in_its_directory_with_its_variables(request_of, commands: Put, job_file, tmp_path) -> None:
    commands("shoal", 'pwd; echo "$GREETING"; printf "%s\\n" "$@"')
    done = bash(local_script(request_of(nodes=1)), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    sets = ["--set", "cluster.nodes=1", "--nproc", "2"]
    inside = ["train", str(job_file), *sets]
    assert done.stdout.splitlines() == ["set up", str(job_file.parent), "it's on", *inside, "finished"]


@pytest.mark.parametrize("finish", ["[]", '["echo finished"]'])
@pytest.mark.parametrize("code", [0, 5])
def test_a_script_ends_as_its_command_does(request_of, commands: Put, tmp_path, finish: str, code: int) -> None:
    commands("shoal", f"exit {code}")
    done = bash(local_script(request_of(nodes=1, finish=finish)), tmp_path)
    assert done.returncode == code
    assert ("finished" in done.stdout) == (code == 0 and finish != "[]")


def test_nothing_is_trained_where_the_set_up_fails(request_of, commands: Put, tmp_path) -> None:
    commands("shoal", "echo trained")
    done = bash(local_script(request_of(nodes=1, setup='["false"]')), tmp_path)
    assert done.returncode == 1 and "trained" not in done.stdout


@pytest.mark.parametrize("finish", ["[]", '["echo finished"]'])
def test_sigterm_reaches_the_ranks_which_end_in_their_own_time(
    request_of, commands: Put, tmp_path, finish: str
) -> None:
    commands("shoal", 'trap "sleep 0.2; echo saved; exit 143" TERM; echo began; while :; do sleep 0.01; done')
    path = tmp_path / "script.sh"
    path.write_text(local_script(request_of(nodes=1, finish=finish, setup="[]")))
    process = subprocess.Popen(["bash", str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "began\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[0] == "saved\n" and process.returncode == 143


@pytest.mark.parametrize("values", [{"time": "9"}, {"time": "9", "finish": "[]"}])
def test_a_signal_that_comes_while_the_command_starts_is_kept_for_it(
    request_of, commands: Put, tmp_path, values: dict[str, str]
) -> None:
    commands("timeout", 'echo begins; sleep 0.3; shift 2; exec "$@"')
    commands("shoal", "exec sleep 60")
    path = tmp_path / "script.sh"
    path.write_text(local_script(request_of(nodes=1, setup="[]", **values)))
    process = subprocess.Popen(["bash", str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begins\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    assert process.poll() is None  # nothing is left behind
    assert process.communicate(timeout=20)[0] == "" and process.returncode == 143


def test_the_exit_code_is_the_command_s_however_soon_it_ends_after_a_signal(request_of, commands: Put, tmp_path):
    commands("shoal", 'trap "exit 7" TERM; echo began; while :; do :; done')
    path = tmp_path / "script.sh"
    path.write_text(local_script(request_of(nodes=1, setup="[]")))
    for _ in range(5):
        process = subprocess.Popen(["bash", str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "began\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=20)[0] == "" and process.returncode == 7


def test_a_time_limit_without_a_scheduler(request_of, commands: Put, tmp_path) -> None:
    commands("shoal", 'trap "exit 7" TERM; while :; do sleep 0.01; done')
    began = time.monotonic()
    assert bash(local_script(request_of(nodes=1, time="1", setup="[]")), tmp_path).returncode == 124
    assert 1 <= time.monotonic() - began < 20


def test_the_script_for_sbatch(request_of, job_file) -> None:
    lines = render(request_of(), "slurm").splitlines()
    assert lines[:15] == [
        "#!/bin/bash",
        "#SBATCH --job-name=my-job",
        "#SBATCH --output=/data/runs/first/logs/slurm-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=2",
        "#SBATCH --cpus-per-task=4",
        "#SBATCH --mem=16384M",
        "#SBATCH --gpus-per-node=2",
        "#SBATCH --time=1-12:00:00",
        "#SBATCH --partition=gpu",
        "#SBATCH --signal=TERM@120",
        "#SBATCH --requeue",
        "#SBATCH --account=lab",
        "set -e",
    ]
    assert f"srun --kill-on-bad-exit=0 --wait=600 --cpus-per-task=4 shoal train '{job_file}' || code=$?" in lines


@pytest.mark.parametrize(
    ("code", "saves", "requeued"), [(0, True, False), (2, True, False), (143, True, True), (143, False, False)]
)
def test_ranks_that_the_time_limit_stopped_queue_again_once_they_saved(
    request_of, commands: Put, tmp_path, code: int, saves: bool, requeued: bool
) -> None:
    request = replace(request_of(), run_dir=tmp_path / "a run")
    for name in ("logs", "checkpoints/step-00000001"):
        (request.record / name).mkdir(parents=True)
    saving = f"sleep 0.05; mkdir '{request.record}/checkpoints/step-00000002'; " if saves else ""
    commands("srun", f'echo "secret $SHOAL_SECRET"; {saving}exit {code}')
    commands("scontrol", 'echo "scontrol $@"')
    script = render(request, "slurm")
    done = bash(f"export SLURM_JOB_ID=77\n{script}", tmp_path)
    assert done.returncode == code and re.search(r"^secret [0-9a-f]{64}$", done.stdout, re.M)
    assert ("scontrol requeue 77" in done.stdout) == requeued
    assert ("finished" in done.stdout) == (code == 0)
    assert "SHOAL_SECRET=" in script and not re.search("[0-9a-f]{64}", script)


def test_a_short_job_has_a_short_notice(request_of) -> None:
    assert "#SBATCH --signal=TERM@36" in render(request_of(time="3m"), "slurm").splitlines()


def test_a_directory_that_sbatch_would_misread(request_of) -> None:
    def options(run_dir: str) -> str:
        return render(replace(request_of(), run_dir=Path(run_dir)), "slurm")

    assert '#SBATCH --output="/a b/50%%/logs/slurm-%j.out"' in options("/a b/50%")
    with pytest.raises(UserError, match="cannot be written into a line of #SBATCH"):
        options('/a"b')


def test_the_specification_for_ray(request_of, commands: Put, tmp_path) -> None:
    commands("shoal", 'printf "%s\\n" "$@"')
    asked = specification(request_of(least=1))
    assert json.loads(render(request_of(least=1), "ray")) == asked
    assert not any(name.startswith("entrypoint_") for name in asked)  # each node reserves its own
    stop = {"RAY_JOB_STOP_WAIT_TIME_S": "120"}
    assert asked["runtime_env"]["env_vars"] == {"NCCL_DEBUG": "WARN", "GREETING": "it's on", **stop}
    done = subprocess.run(asked["entrypoint"], shell=True, capture_output=True, text=True, cwd=tmp_path, check=True)
    lines = done.stdout.splitlines()
    assert (lines[0], lines[1], lines[-1]) == ("set up", "train", "finished")
    assert lines[-5:-1] == ["--nproc", "2", "--nodes", "1:2"]
    assert "--nodes 2:2" in specification(request_of())["entrypoint"]


def test_what_ray_has_on_one_host_only(request_of) -> None:
    asked = specification(replace(request_of(nodes=1), fixed=True))
    assert "--nproc 2" in asked["entrypoint"] and "--nodes" not in asked["entrypoint"]
    names = ("entrypoint_num_cpus", "entrypoint_num_gpus", "entrypoint_memory")
    assert [asked[name] for name in names] == [9, 2, 16 * 2**30]
    with pytest.raises(UserError, match=r"Leave out run.at, or set cluster.nodes=1"):
        render(replace(request_of(), fixed=True), "ray")


def test_one_host_refuses_to_be_two(request_of) -> None:
    with pytest.raises(UserError, match=r"cluster.nodes = 2.*nodes=1"):
        render(request_of(), "local")


def test_an_unknown_target(request_of) -> None:
    with pytest.raises(UserError, match=r'there is no such target.*Did you mean "kubernetes"'):
        render(request_of(), "kubernets")
    assert list(TARGETS) == ["local", "slurm", "ray", "kubernetes", "jobset", "trainjob"]


def test_a_module(job_file, tmp_path) -> None:
    request = Request("m", Cluster(), 3, Path("runs/m"), tmp_path, module=("trainer.task", "--steps", "3"))
    assert request.host() == ["shoal", "run", "--nproc", "3", "-m", "trainer.task", "--", "--steps", "3"]
    assert "srun --kill-on-bad-exit=0 --wait=600 python -m trainer.task --steps 3 ||" in render(request, "slurm")
    served = replace(request, parameter_servers=2)
    several = replace(request, cluster=Cluster(nodes=2, cpus=6, gpus=3, memory="6GiB"))
    with pytest.raises(UserError, match=r"worker_count = 2, and this is one host: give worker_count = 1"):
        render(several, "local")
    with pytest.raises(UserError, match=r'docker_image is missing.*docker_image = "lab/shoal"'):
        render(several, "kubernetes")
    shares = f"--ranks 6 --cpus 2 --gpus 1 --memory {2 * 2**30}"
    assert f"exec python -m shoal.launch.ray {shares} -- -m trainer.task --steps 3" in render(several, "ray")
    assert "shoal run --roles ps=2,worker=3 -m trainer.task -- --steps 3" in render(served, "local")
    assert "shoal run --roles ps=2,worker=3 -m trainer.task -- --steps 3" in render(served, "ray")
    for target in ("slurm", "kubernetes"):
        with pytest.raises(UserError, match="leave ps_count out"):
            render(replace(served, cluster=replace(served.cluster, image="lab/shoal")), target)
    with pytest.raises(UserError, match="leave ps_count out"):
        render(replace(several, parameter_servers=2), "ray")
