"""One run at a time in a run directory: who has it, when a lock is stale, and what is not locked out."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from shoal.comm import World
from shoal.elastic.control import JOB
from shoal.errors import UserError
from shoal.federated.settings import STATE
from shoal.jobs import lock
from shoal.jobs.lock import NAME, Holder, locked, own_hold
from shoal.jobs.names import DIRECTORY
from shoal.jobs.plans import forget
from shoal.jobs.replan import ask
from tests.pool import run_ranks

pytestmark = pytest.mark.fast


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE", 0.2)


def holder_of(run_dir: Path) -> Holder:
    """Who has the directory, whenever it was taken."""
    return replace(Holder(**json.loads((run_dir / NAME).read_text())), taken=0)


def put(run_dir: Path, holder: Holder) -> None:
    run_dir.mkdir(exist_ok=True)
    (run_dir / NAME).write_text(json.dumps(asdict(holder)))


def test_the_directory_is_taken_inside_and_free_after_it(tmp_path, impatient):
    group = World.single("cpu").everyone
    with locked(tmp_path, group):
        assert holder_of(tmp_path) == Holder.here()
        with pytest.raises(
            UserError,
            match=rf"in use by process {os.getpid()} on host .*: wait for it, end it, or give another run.dir",
        ):
            locked(tmp_path, group).__enter__()
    assert not (tmp_path / NAME).exists()
    with pytest.raises(KeyError), locked(tmp_path, group):
        raise KeyError
    assert not (tmp_path / NAME).exists()


def test_a_lock_is_stale_once_its_process_has_ended(tmp_path, impatient):
    group = World.single("cpu").everyone
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    alive = Holder(Holder.here().host, sleeper.pid, psutil.Process(sleeper.pid).create_time())
    put(tmp_path, alive)
    with pytest.raises(UserError, match=f"process {sleeper.pid}"):
        locked(tmp_path, group).__enter__()
    put(tmp_path, replace(alive, started=alive.started - 100))  # its number is another process's by now
    with locked(tmp_path, group):
        assert holder_of(tmp_path) == Holder.here()
    put(tmp_path, alive)
    sleeper.send_signal(signal.SIGKILL)
    time.sleep(0.1)  # nobody has asked for its end yet: it is a zombie
    with locked(tmp_path, group):
        pass
    sleeper.wait()
    put(tmp_path, alive)
    with locked(tmp_path, group):
        pass
    (tmp_path / NAME).write_text("{")
    with locked(tmp_path, group):
        assert holder_of(tmp_path) == Holder.here()


def test_a_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for run_dir in (tmp_path / "file", tmp_path / "file" / "run"):
        lock.refuse_if_taken(run_dir)  # nobody has it
        forget(run_dir)
        with pytest.raises(UserError, match=r"the run directory .*file.* cannot be written: .*Choose another run.dir"):
            locked(run_dir, World.single("cpu").everyone).__enter__()
    (tmp_path / NAME).mkdir()  # stands for a lock that this user may not read
    with pytest.raises(UserError, match=r"the run directory .* cannot be read: .*Choose another run.dir"):
        lock.refuse_if_taken(tmp_path)


def test_of_a_run_that_has_ended_the_plan_that_was_asked_for_is_told(tmp_path):
    """An exchange that refuses it too, and a checkpoint only where there is one."""
    with pytest.raises(UserError, match=r"no run trains in .*give the directory of a run of `shoal train`"):
        ask(tmp_path, {"tp": 2})
    job = tmp_path / "resolved.toml"
    job.write_text('[model]\nname = "chess"\n[train]\nsteps = 2\n[plan]\ndp = 4\nexchange = "local_sgd"\n')
    with pytest.raises(UserError, match=r"resolved.toml --set plan.dp=2 --set plan.tp=2$"):
        ask(tmp_path, {"tp": 2})
    (tmp_path / DIRECTORY / "step-00000002").mkdir(parents=True)
    with pytest.raises(UserError, match=r"--set plan.tp=2, which goes on from its newest checkpoint$"):
        ask(tmp_path, {"tp": 2})
    with pytest.raises(UserError, match=r"does not go with plan.zero = 3: its replicas train apart"):
        ask(tmp_path, {"zero": 3})
    with pytest.raises(UserError, match="tp 3 = 3 ranks, but 4"):
        ask(tmp_path, {"tp": 3})


def test_a_run_without_a_plan_to_change_refuses_at_once(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        ask(tmp_path / "nowhere", {"zero": 3})
    with locked(tmp_path, World.single("cpu").everyone, replans=False):
        assert own_hold(tmp_path) is not None
        with pytest.raises(UserError, match=r"cannot change while it trains.*has a parameter server, or is of `shoal"):
            ask(tmp_path, {"zero": 3})
    assert own_hold(tmp_path) is None and not list(tmp_path.glob("replan-*"))
    with pytest.raises(UserError, match="no run trains in"):
        ask(tmp_path, {"zero": 3})
    (tmp_path / STATE).touch()  # rounds of `shoal fed` that are over, which no `shoal train` goes on with
    with pytest.raises(UserError, match="cannot change while it trains"):
        ask(tmp_path, {"zero": 3})


def test_a_lock_of_another_host_is_refused_with_what_to_do(tmp_path):
    put(tmp_path, Holder("elsewhere", 1, 0.0))
    began = time.monotonic()
    with pytest.raises(UserError, match=r"process 1 on host elsewhere.*if that process has ended, delete .*run.lock"):
        locked(tmp_path, World.single("cpu").everyone).__enter__()
    assert time.monotonic() - began < 1, "there is nothing to wait for"
    (tmp_path / NAME).unlink()  # what the message says
    with locked(tmp_path, World.single("cpu").everyone):
        pass


def entering(world: World, run_dir: str) -> tuple[str, bool]:
    lock.PATIENCE = 0.2
    try:
        with locked(Path(run_dir), world.everyone):
            world.everyone.barrier()
            seen = (Path(run_dir) / NAME).exists()
            world.everyone.barrier()
            return "in", seen
    except UserError as error:
        return str(error), False


def test_all_ranks_are_refused_alike(tmp_path):
    assert run_ranks(entering, 2, str(tmp_path)) == [("in", True)] * 2
    put(tmp_path, Holder.here())
    first, second = run_ranks(entering, 2, str(tmp_path))
    assert first == second and f"process {os.getpid()}" in first[0]


def test_a_process_of_a_job_whose_nodes_come_and_go_knows_its_own_hold(tmp_path, monkeypatch):
    monkeypatch.setenv(JOB, "one job")
    with locked(tmp_path, World.single().everyone):
        held = own_hold(tmp_path)
        assert held is not None and (held.job, held.pid) == ("one job", os.getpid())
        assert lock.holder_of(tmp_path) is None  # for its own job, which may take it over; others see it
        monkeypatch.delenv(JOB)
        assert lock.holder_of(tmp_path) == held
        monkeypatch.setenv(JOB, "one job")
    assert own_hold(tmp_path) is None


def test_on_a_full_disk_a_later_generation_goes_on_and_a_new_run_is_refused(tmp_path, monkeypatch, caplog):
    def full(path: Path, text: str) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lock, "replace_text", full)
    monkeypatch.setenv(JOB, "one job")
    before = Holder("elsewhere", 1, 0.0, job="one job")
    put(tmp_path, before)
    with locked(tmp_path, World.single().everyone):
        assert holder_of(tmp_path) == before
    assert "run.lock stays that of the generation before: it cannot be written ([Errno 28]" in caplog.text
    (tmp_path / NAME).unlink()
    opened = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *args, **more: (full if "x" in args else opened)(path, *args, **more)
    )
    with pytest.raises(UserError, match=r"cannot be written: \[Errno 28\] No space left.*Choose another run.dir"):
        locked(tmp_path, World.single().everyone).__enter__()
