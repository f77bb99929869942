"""`launch` with real processes: what is shown, what is returned, and that nothing lives on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from shoal.errors import UserError
from shoal.launch import launch, process
from shoal.launch.rank import run_program
from shoal.launch.roles import launch_roles
from shoal.launch.served import launch_served

LAUNCHER = "import sys; from shoal.launch import launch; sys.exit(launch(sys.argv[2:], int(sys.argv[1])))"


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str) -> list[str]:
        path = tmp_path / "script.py"
        path.write_text("import os, sys, time\nrank = int(os.environ['RANK'])\n" + text)
        return [str(path)]

    return write


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


def test_ranks_meet_and_know_their_place_and_arguments(script, tmp_path: Path, capfd) -> None:
    program = script(
        "import torch, shoal.launch, helper\n"
        "world = shoal.launch.join()\n"
        "total = world.everyone.all_reduce(torch.tensor([1 + world.rank]))\n"
        "print(world.rank, world.size, world.local_rank, world.local_size, total.item(), sys.argv[1:], "
        "os.environ['OMP_NUM_THREADS'], os.environ['TORCH_CPP_LOG_LEVEL'], __name__)\n"
    )
    (tmp_path / "helper.py").write_text("")  # a script imports what lies beside it
    assert launch([*program, "--lr", "3"], 2, run_dir=tmp_path / "run", threads=1) == 0
    assert capfd.readouterr().out == "0 2 0 2 3 ['--lr', '3'] 1 ERROR __main__\n"
    assert (tmp_path / "run/logs/rank1.log").read_text() == "1 2 1 2 3 ['--lr', '3'] 1 ERROR __main__\n"


def test_a_script_made_for_torchrun_runs_and_modules_do(script, tmp_path: Path, capfd, monkeypatch) -> None:
    script(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([1.0 + dist.get_rank()])\n"
        "dist.all_reduce(total)\n"
        "print(total.item(), sys.argv[1:])\n"
        "dist.destroy_process_group()\n"
    )
    monkeypatch.chdir(tmp_path)
    assert launch(["-m", "script", "x"], 2, env={"GLOO_SOCKET_IFNAME": "lo"}) == 0
    assert capfd.readouterr().out == "3.0 ['x']\n"


@pytest.mark.usefixtures("forked")
def test_a_rank_that_raises_is_shown_first_and_the_others_are_ended(script, capfd, tmp_path) -> None:
    spoken = str(tmp_path / "spoken")  # by the first rank, before the other one raises
    program = script(
        "print('before', flush=True)\n"
        f"if rank == 0:\n    open({spoken!r}, 'w').close()\n"
        "if rank == 1:\n"
        f"    while not os.path.exists({spoken!r}):\n        time.sleep(0.01)\n"
        "    raise ValueError('bad sample 7')\n"
        "time.sleep(600)\n"
    )
    assert launch(program, 3) == 1
    out, err = capfd.readouterr()
    assert out == "before\n"
    lines = err.splitlines()
    assert lines[0].startswith("error: rank 1 on host ") and lines[0].endswith(" failed:")
    assert lines[1] == "Traceback (most recent call last):" and "script.py" in lines[2]
    assert "ValueError: bad sample 7" in lines and "[rank 1] before" in lines
    assert lines[-1] == "rank 0, 2: stopped by the launcher"
    assert "launch/rank.py" not in err and "runpy" not in err


@pytest.mark.usefixtures("forked")
def test_the_rank_at_fault_goes_before_those_that_lost_it(script, capfd) -> None:
    program = script(
        "import torch, signal, shoal.launch\n"
        "world = shoal.launch.join()\n"
        "world.everyone.barrier()\n"
        "if rank == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "world.everyone.barrier()\n"
    )
    assert launch(program, 2) == 4
    lines = capfd.readouterr().err.splitlines()
    first = next(line for line in lines if line.startswith("error:"))
    assert (
        "rank 1 on host" in first
        and "was killed by signal 9 (SIGKILL): often the kernel's out-of-memory killer" in first
    )
    assert lines[-1].startswith("rank 0: lost its peer: ")


@pytest.mark.usefixtures("forked")
def test_an_exit_code_of_a_rank_is_that_of_the_run(script, capfd) -> None:
    assert launch(script("if rank == 1:\n    os._exit(7)\n"), 2) == 7
    assert "rank 1 on host" in (err := capfd.readouterr().err) and "ended with exit code 7" in err


@pytest.mark.usefixtures("forked")
def test_a_user_s_mistake_is_its_message_alone_and_said_once(script, capfd) -> None:
    program = script("from shoal.errors import UserError\nraise UserError('the corpus is empty: name another')\n")
    assert launch(program, 2) == 2
    assert capfd.readouterr().err == "error: the corpus is empty: name another\n"


@pytest.mark.usefixtures("forked")
def test_an_error_of_the_factory_is_shown_once(script, capfd) -> None:
    """Not once a rank, nor once for each way in which the engine tries to build the model."""
    program = script(
        "import shoal, torch\ndef make():\n    raise KeyError('my own')\n"
        "shoal.Engine(make, lambda model, mb: (0, 0), torch.optim.SGD, global_batch=4)"
    )
    assert launch(program, 2) == 1
    said = capfd.readouterr().err
    assert said.count("KeyError: 'my own'") == 1 and said.count("Traceback") == 1 and "every rank failed" in said


@pytest.mark.usefixtures("forked")
def test_a_rank_that_leaves_is_named_also_where_its_process_takes_long_to_end(script, capfd) -> None:
    program = script(
        "import atexit\n"
        "if rank == 1: atexit.register(time.sleep, 600)  # is called last, when the others have missed it\n"
        "import torch\nfrom shoal.launch import join\nworld = join()\nworld.everyone.barrier()\n"
        "if rank == 1: sys.exit(0)\nworld.everyone.all_reduce(torch.ones(3))"
    )
    assert launch(program, 2) == 4
    said = capfd.readouterr().err
    assert said.startswith("error: rank 1 on host ") and "ended with exit code 0 while the others" in said


@pytest.mark.usefixtures("forked")
def test_a_failed_rank_stuck_in_its_exit_handlers_does_not_hold_the_run(script, capfd, monkeypatch) -> None:
    monkeypatch.setattr(process, "PEER_GRACE", 0.2)
    program = script("import atexit\natexit.register(time.sleep, 600)\nraise KeyError('stuck')\n")
    assert launch(program, 1) == 1
    assert "KeyError: 'stuck'" in capfd.readouterr().err


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("error, code", [("TrainingError", 3), ("CheckpointError", 5)])
def test_what_ends_training_on_all_ranks_leaves_the_first_one_time_for_the_report(
    script, capfd, monkeypatch, tmp_path: Path, error: str, code: int
) -> None:
    monkeypatch.setattr(process, "PEER_GRACE", 0.1)
    program = script(
        f"from shoal.errors import {error}\nif rank == 0:\n    time.sleep(0.7)\n"
        f"    open({str(tmp_path / 'report')!r}, 'w')\nraise {error}('of all')\n"
    )
    assert launch(program, 2) == code
    assert capfd.readouterr().err == "error: of all\n" and (tmp_path / "report").exists()


@pytest.mark.usefixtures("forked")
def test_what_a_rank_started_ends_with_it(script, tmp_path: Path) -> None:
    program = script(
        f"import subprocess\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n"
    )
    assert launch(program, 1) == 0
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.fast
@pytest.mark.parametrize(
    "program, nproc, message",
    [
        (["no/such.py"], 2, "the script no/such.py does not exist"),
        ([os.path.dirname(__file__)], 2, "tests/launch is a directory without a __main__.py: give a script"),
        ([], 2, "no program to run"),
        (["-m"], 2, "no program to run"),
        ([__file__], 0, "nproc = 0"),
    ],
)
def test_nothing_to_start(program: list[str], nproc: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        launch(program, nproc)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package, a directory that Python can run, and broken modules; what they import is forgotten."""
    for name, text in {
        "pack/__init__.py": "",
        "pack/broken.py": "import nosuch_inside",
        "pack/nested.py": "import runpy\nrunpy.run_module('nosuch')",
        "folder/__main__.py": "raise KeyError('runs')",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with patch.dict(sys.modules):
        yield tmp_path


@pytest.mark.fast
@pytest.mark.parametrize(
    "program, message",
    [
        (["-m", "nosuch"], "-m nosuch cannot be run: No module named nosuch (looked in {here} and the paths of"),
        (["-m", "nosuch.part"], "-m nosuch.part cannot be run: Error while finding module specification for 'nosuch.p"),
        (["-m", "pack.nosuch"], "-m pack.nosuch cannot be run: No module named pack.nosuch (looked in"),
        (["-m", "pack"], "-m pack cannot be run: No module named pack.__main__; 'pack' is a package and cannot be"),
        (["/proc/self/mem"], "/proc/self/mem cannot be run: [Errno 5] Input/output error"),
    ],
)
def test_a_program_that_is_not_there_is_told_in_one_line(packages: Path, program: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        run_program(program)
    assert str(refused.value).startswith(message.format(here=packages)) and "\n" not in str(refused.value)


@pytest.mark.fast
@pytest.mark.parametrize(
    "program, error",
    [
        (["-m", "pack.broken"], "No module named 'nosuch_inside'"),
        (["-m", "pack.broken.part"], "No module named 'nosuch_inside'"),
        (["-m", "pack.nested"], "No module named nosuch"),
        (["folder"], "runs"),
    ],
)
def test_an_error_of_the_program_stays_its_own(packages: Path, program: list[str], error: str) -> None:
    with pytest.raises((ImportError, KeyError), match=error):
        run_program(program)


@pytest.mark.fast
def test_a_run_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for run_dir in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match=r"the run directory .*file.* cannot be written: .*Choose another run.dir"):
            launch([__file__], 2, run_dir=run_dir)
        with pytest.raises(UserError, match=r"Choose another run.dir"):
            launch_served([__file__], {"ps": 1, "worker": 1}, run_dir)
        with pytest.raises(UserError, match=r"Choose another run.dir"):
            launch_roles([__file__], {"worker": 1, "evaluator": 1}, run_dir=run_dir)


def test_a_server_that_ends_because_a_worker_cannot_go_on_is_no_error_of_its_own(tmp_path: Path, capfd) -> None:
    """Also before it heeds signals itself."""
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, time\n"
        "from shoal.errors import UserError\n"
        "if json.loads(os.environ['TF_CONFIG'])['task']['type'] == 'worker':\n"
        "    raise UserError('the corpus is empty')\n"
        "time.sleep(600)\n"
    )
    assert launch_served([str(program)], {"ps": 1, "worker": 1}, tmp_path / "run") == UserError.exit_code
    assert capfd.readouterr().err == "error: the worker 0 has failed: the corpus is empty\n"


@pytest.fixture
def sleeping_run(script, tmp_path: Path):
    """A launcher of two ranks that tell their ids and sleep."""
    program = script(
        "try:\n"
        f"    open({str(tmp_path)!r} + f'/pid{{rank}}.new', 'w').write(str(os.getpid()))\n"
        f"    os.rename({str(tmp_path)!r} + f'/pid{{rank}}.new', {str(tmp_path)!r} + f'/pid{{rank}}')\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    print('tidied up', rank, flush=True)\n"
        "    raise\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "2", *program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    wait_until(lambda: all(file.exists() for file in files) or launcher.poll() is not None)
    pids = [int(file.read_text()) for file in files]
    yield launcher, pids
    launcher.kill()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launcher.communicate()


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_sigint_is_passed_on_and_the_ranks_tidy_up(sleeping_run) -> None:
    launcher, pids = sleeping_run
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=60)
    assert (launcher.returncode, out, err) == (130, "tidied up 0\n", "")
    assert gone(pids)


def test_sigterm_ends_the_run(sleeping_run) -> None:
    launcher, pids = sleeping_run
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM and gone(pids)


def test_a_signal_before_there_are_ranks_ends_the_launcher(script) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, "2", *script("")], stderr=subprocess.PIPE)
    wait_until(lambda: psutil.Process(launcher.pid).children() or launcher.poll() is not None)
    (forks,) = psutil.Process(launcher.pid).children()
    launcher.send_signal(signal.SIGINT)
    assert (launcher.wait(60), launcher.stderr.read()) == (128 + signal.SIGINT, b"")
    assert gone([forks.pid])


def test_a_second_sigterm_leaves_the_ranks_their_time(tmp_path, script) -> None:
    program = script(
        "import signal\n"
        f"def tidy(*_): time.sleep(1); open({str(tmp_path)!r} + f'/tidied{{rank}}', 'w').close(); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, tidy)\n"
        f"open({str(tmp_path)!r} + f'/up{{rank}}', 'w').close()\n"
        "time.sleep(600)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, "2", *program])
    wait_until(lambda: all((tmp_path / f"up{rank}").exists() for rank in range(2)))
    for _ in range(2):
        launcher.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert launcher.wait(60) == 128 + signal.SIGTERM
    assert all((tmp_path / f"tidied{rank}").exists() for rank in range(2))


def test_ranks_that_do_not_end_in_time_are_killed_and_that_is_said(tmp_path, script) -> None:
    program = script(
        "import signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(tmp_path)!r} + f'/up{{rank}}', 'w').close()\n"
        "time.sleep(600)\n"
    )
    hasty = f"from shoal.launch import local; local.SIGNAL_GRACE = 0.2; {LAUNCHER}"
    launcher = subprocess.Popen([sys.executable, "-c", hasty, "2", *program], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: all((tmp_path / f"up{rank}").exists() for rank in range(2)))
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert "warning: ranks that had not ended 0.2 s after the signal were killed; what they were saving is lost" in err


def test_a_signal_does_not_hide_that_the_last_checkpoint_failed(tmp_path, script) -> None:
    program = script(
        "from shoal.errors import CheckpointError\n"
        "try:\n"
        f"    open({str(tmp_path)!r} + '/up' + str(rank), 'w').close()\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    raise CheckpointError('no space')\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, "2", *program], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: all((tmp_path / f"up{rank}").exists() for rank in (0, 1)) or launcher.poll() is not None)
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 5 and "no space" in err


def test_no_orphan_outlives_a_killed_launcher(sleeping_run) -> None:
    launcher, pids = sleeping_run
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    wait_until(lambda: gone(pids), 20)


BUSY = {
    "in a collective": "while True:\n    world.everyone.all_reduce(torch.ones(1000))\n",
    "computing": "while True:\n    torch.ones(100).sum()\n",
    "asleep": "time.sleep(600)\n",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)\n",
}


@pytest.mark.parametrize("busy", BUSY.values(), ids=BUSY)
@pytest.mark.usefixtures("forked")
@pytest.mark.alone
def test_all_ranks_are_gone_soon_after_a_death(busy, script, tmp_path: Path, capfd) -> None:
    program = script(
        "import signal, torch, shoal.launch\n"
        "world = shoal.launch.join()\n"
        "world.everyone.barrier()\n"
        f"open({str(tmp_path)!r} + f'/pid{{rank}}', 'w').write(str(os.getpid()))\n"
        "if rank == 1:\n"
        "    time.sleep(0.5)\n"
        f"    open({str(tmp_path)!r} + '/died', 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n" + busy
    )
    assert launch(program, 3) == 4
    seconds = time.time() - (tmp_path / "died").stat().st_mtime
    assert "rank 1 on host" in capfd.readouterr().err
    assert gone([int((tmp_path / f"pid{rank}").read_text()) for rank in range(3)])
    assert seconds < 3  # 2 where a rank has a core of its own


@pytest.mark.usefixtures("forked")
@pytest.mark.alone
def test_a_stall_of_rank_0_is_seen_where_the_ranks_were_started(script, capfd) -> None:
    """The output of the ranks that wait goes to files."""
    program = script(
        "import torch, shoal.launch\n"
        "from shoal.comm import stalls\n"
        "stalls.STALL_SECONDS, stalls.SIGN_SECONDS, stalls._LOOK_SECONDS = 1.0, 0.2, 0.1\n"
        "world = shoal.launch.join()\n"
        "world.everyone.barrier()\n"
        "if rank == 0:\n"
        "    time.sleep(2.5)\n"
        "world.everyone.all_reduce(torch.ones(3), purpose='loss')\n"
        "time.sleep(0.3)\n"
    )
    assert launch(program, 3) == 0
    first, second = capfd.readouterr().err.splitlines()
    assert first == "shoal: rank 1 has waited 1 s in all_reduce (loss), collective 2 of group world, for rank 0"
    assert second.startswith("shoal: rank 1: all_reduce (loss), collective 2 of group world goes on after")
