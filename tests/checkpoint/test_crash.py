"""Full disks and killed processes, in disposable children: the last good checkpoint stays."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shoal.checkpoint import Want, load, newest
from shoal.parallel import Box
from tests.checkpoint.fake_ranks import save_alone

PRELUDE = """
import resource, sys, types
import torch
from torch.distributed import HashStore
from shoal.checkpoint import Writer, load, newest, share
from shoal.errors import CheckpointError
from shoal.parallel import Layout
torch.set_num_threads(1)
directory = sys.argv[1]
world = types.SimpleNamespace(rank=0, size=1, store=None, lost=str)
def pieces(kib):
    return share("w", torch.zeros(kib * 256), Layout.replicated((kib * 256,)), 0, 1)
"""

FULL = (
    PRELUDE
    + """
writer = Writer(directory, world)
writer.save(1, pieces(100), {}, wait=True)
if sys.argv[2] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
try:
    writer.save(2, pieces(4096), {}, wait=True)
except CheckpointError as error:
    print(error)
print(newest(directory, print))
import os
print(sorted(os.listdir(directory)))
writer.save(3, pieces(100), {}, wait=True)
print(newest(directory, print))
"""
)


def check_full_disk(output: str, reason: str) -> None:
    error, best, names, after = output.splitlines()
    assert "saving the checkpoint of step 2" in error
    assert reason in error
    assert "free space" in error
    assert best.endswith("step-00000001")
    assert names == "['step-00000001']"
    assert after.endswith("step-00000003")


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), "limit"], capture_output=True, text=True, timeout=60
    )
    assert child.returncode == 0, child.stderr
    check_full_disk(child.stdout, "File too large")


def test_a_full_disk(tmp_path: Path) -> None:
    """A real one: a 2 MiB tmpfs in a mount namespace of the child's own, which goes with it."""
    in_namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = 'mount -t tmpfs -o size=2m shoal "$0"'
    try:
        probe = subprocess.run([*in_namespace, mount, str(tmp_path)], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no unshare command for a disk of our own; the file-size limit is tested above")
    if probe.returncode:
        pytest.skip(f"no mount namespace allowed here ({probe.stderr.strip()}); the file-size limit is tested above")
    command = [*in_namespace, f'{mount} && exec "$1" -c "$2" "$0" disk', str(tmp_path), sys.executable, FULL]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
    check_full_disk(child.stdout, "No space left on device")
    assert list(tmp_path.iterdir()) == []


KILLED = (
    PRELUDE
    + """
world = types.SimpleNamespace(rank=0, size=2, store=HashStore(), lost=str)
Writer(directory, world).save(2, pieces(512), {}, wait=True)  # waits for a rank 1 that never comes
"""
)


def test_a_process_killed_in_the_middle_leaves_the_one_before(tmp_path: Path) -> None:
    save_alone(tmp_path, 1, {"w": torch.full((3,), 5.0)})
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    try:
        file, deadline = tmp_path / "step-00000002.tmp" / "__0_0.distcp", time.monotonic() + 60
        while not (file.exists() and file.stat().st_size > 512 * 1024):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    named: list[str] = []
    best = newest(tmp_path, lambda path, reason: named.append(f"{path.name}: {reason}"))
    assert best == tmp_path / "step-00000001"
    assert named == ["step-00000002.tmp: the save did not finish"]
    into = torch.empty(3)
    load(best, [Want("w", (3,), Box((0,), (3,)), into)])
    assert into.tolist() == [5.0, 5.0, 5.0]
