"""What killed launchers leave in the temporary directory goes at the next start; nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shoal.launch import scratch as scratch_module
from shoal.launch.scratch import scratch, sweep


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


MAKE = (
    "import time; from shoal.launch.scratch import scratch\nwith scratch('run') as folder:\n"
    "    (folder / 'rank0.json').touch(); print(folder, flush=True); time.sleep(60)"
)


@pytest.mark.fast
def test_the_folder_of_a_killed_process_goes_at_the_next_start_and_that_of_a_living_one_stays(temporary: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        for _ in range(2)
    ]
    try:
        killed, living = (Path(process.stdout.readline().strip()) for process in processes)  # type: ignore[union-attr]
        assert killed.parent == temporary and killed.stat().st_mode & 0o777 == 0o700
        processes[0].kill()
        processes[0].wait()
        with scratch("run") as own:
            assert sorted(temporary.iterdir()) == sorted([living, own])
            assert sweep() == []
        assert list(temporary.iterdir()) == [living]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.fast
def test_only_folders_of_dead_processes_of_this_user_and_namespace_go(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = scratch_module._namespace()
    own = (os.getpid(), scratch_module._started(os.getpid()))
    dead = temporary / f"shoal-run-{namespace}-{2**22 + 1}-5-abc"
    others = [temporary / f"shoal-{kind}-{namespace}-{2**22 + 1}-5-abc" for kind in scratch_module.KINDS[1:]]
    again = temporary / f"shoal-doctor-{namespace}-{own[0]}-{own[1] - 1}-abc"  # the id has come again
    kept = [
        temporary / f"shoal-run-{namespace + 1}-{2**22 + 1}-5-abc",
        temporary / f"shoal-run-{namespace}-{own[0]}-{own[1]}-abc",
        temporary / "shoal-abc",
        temporary / "shoal-user-0",
        temporary / f"notshoal-run-{namespace}-{2**22 + 1}-5-abc",
    ]
    for path in (dead, *others, again, *kept):
        path.mkdir()
    precious = temporary / "precious"
    precious.mkdir()
    link = temporary / f"shoal-run-{namespace}-{2**22 + 1}-6-abc"
    link.symlink_to(precious)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert sweep() == []
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert sorted(sweep()) == sorted([dead, *others, again])
    assert all(path.exists() for path in (*kept, precious, link))
