"""Local tasks of a TF_CONFIG cluster: ranks, and beside them parameter servers and the evaluator."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shoal.errors import UserError
from shoal.launch.roles import launch_roles
from tests.launch.test_local import gone, wait_until

SCRIPT = """
import json, os, sys, time
cluster, task = map(json.loads(os.environ["TF_CONFIG"]).get, ("cluster", "task"))
place = open(os.path.join(os.path.dirname(__file__), f"{task['type']}{task['index']}"), "w")
print(os.getpid(), task["type"], task["index"], {role: len(tasks) for role, tasks in cluster.items()}, file=place)
place.close()
if task["type"] == "ps":
    time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str) -> list[str]:
        path = tmp_path / "script.py"
        path.write_text(SCRIPT + text)
        return [str(path)]

    return write


@pytest.mark.matrix
def test_a_script_that_branches_on_tf_config_runs_in_all_roles(script, tmp_path: Path, capfd) -> None:
    program = script(
        "import shoal.launch\n"
        "if task['type'] == 'evaluator':\n"
        "    time.sleep(1)\n"
        "    print('evaluated', flush=True)\n"
        "    sys.exit()\n"
        "world = shoal.launch.join()\n"
        "print(world.everyone.all_gather_object([world.rank, task['type'], task['index']]))\n"
    )
    assert launch_roles(program, {"ps": 2, "chief": 1, "worker": 1, "evaluator": 1}) == 0
    out, err = capfd.readouterr()
    assert out == "[[0, 'chief', 0], [1, 'worker', 0]]\nevaluated\n" and err == ""
    counts = "{'ps': 2, 'chief': 1, 'worker': 1, 'evaluator': 1}"
    told = {path.name: path.read_text().split(" ", 1) for path in tmp_path.iterdir() if path.suffix == ""}
    assert {name: text for name, (_, text) in told.items()} == {
        f"{role}{number}": f"{role} {number} {counts}\n"
        for role, number in (("ps", 0), ("ps", 1), ("chief", 0), ("worker", 0), ("evaluator", 0))
    }
    assert gone([int(pid) for pid, _ in told.values()])


@pytest.mark.matrix
def test_an_evaluator_beside_the_only_task_of_a_step_is_no_rank(script, monkeypatch, capfd) -> None:
    for name in ("RANK", "SLURM_PROCID", "SLURM_STEP_ID", "JOB_COMPLETION_INDEX"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    program = script("from shoal.launch import discover\nprint(discover().evaluates)\n")
    assert launch_roles(program, {"worker": 1, "evaluator": 1}) == 0
    assert sorted(capfd.readouterr().out.split()) == ["False", "True"]


@pytest.mark.matrix
def test_what_fails_beside_the_ranks_is_said_and_does_not_end_them(script, tmp_path: Path, capfd) -> None:
    program = script("if task['type'] == 'evaluator':\n    import torch\n    torch.ones(2) @ torch.ones(3)\n")
    assert launch_roles(program, {"worker": 1, "evaluator": 1}, run_dir=tmp_path / "run") == 1
    assert (tmp_path / "worker0").exists()
    log = tmp_path / "run/logs/evaluator0.log"
    assert capfd.readouterr().err == f"error: the evaluator ended with exit code 1: see {log}\n"
    assert "RuntimeError" in log.read_text()


@pytest.mark.matrix
def test_ranks_that_fail_end_the_others(script, tmp_path: Path, capfd) -> None:
    program = script(
        "if task['type'] == 'worker':\n"
        f"    while not os.path.exists({str(tmp_path / 'evaluator0')!r}):\n"
        "        time.sleep(0.1)\n"
        "    sys.exit(7)\n"
        "time.sleep(600)\n"
    )
    assert launch_roles(program, {"worker": 1, "evaluator": 1}) == 7
    assert "ended with exit code 7" in capfd.readouterr().err
    assert gone([int((tmp_path / "evaluator0").read_text().split()[0])])


@pytest.mark.matrix
def test_nothing_outlives_a_launcher_that_is_killed(script, tmp_path: Path) -> None:
    program = script("time.sleep(600)\n")
    start = (
        "import sys; from shoal.launch.roles import launch_roles; launch_roles(sys.argv[1:], {'worker': 1, 'ps': 1})"
    )
    launcher = subprocess.Popen([sys.executable, "-c", start, *program])
    wait_until(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in ("worker0", "ps0")))
    pids = [int((tmp_path / name).read_text().split()[0]) for name in ("worker0", "ps0")]
    assert all(psutil.pid_exists(pid) for pid in pids)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    wait_until(lambda: gone(pids), 20)


def test_a_script_that_does_not_exist_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    before = psutil.Process().children()
    with pytest.raises(UserError, match=r"the script .* does not exist"):
        launch_roles([str(tmp_path / "none.py")], {"worker": 1, "evaluator": 1})
    assert psutil.Process().children() == before
