"""The standing pool and the disposable ranks: results, failures, hangs, deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests import leftovers, pool
from tests.pool import RankError, disposable_ranks, run_ranks


def add(world, value):
    total = world.everyone.all_reduce(torch.tensor([value + world.rank]))
    return world.rank, world.size, total


def pid(world):
    return os.getpid()


def threads(world):
    return torch.get_num_threads()


def raise_on(world, rank):
    world.everyone.barrier()
    if world.rank == rank:
        raise KeyError(f"raised by rank {rank}")
    world.everyone.barrier()


def hang_on(world, rank):
    if world.rank == rank:
        time.sleep(600)


def exit_on(world, rank):
    if world.rank == rank:
        os._exit(7)


def wait_forever(world):
    time.sleep(600)


def unpicklable(world):
    return lambda: None


kept: list[bytearray] = []


def keep(world, size):
    kept.append(bytearray(b"1" * size))


def test_a_rank_that_holds_much_is_a_new_one_in_the_next_call(monkeypatch):
    before = run_ranks(pid, 2)
    monkeypatch.setattr(pool, "LARGE", pool._standing[0].holds + 2**28)
    run_ranks(keep, 1, 2**27)
    assert run_ranks(pid, 2) == before
    run_ranks(keep, 1, 2**28)
    after = run_ranks(pid, 2)
    assert after[0] != before[0] and after[1] == before[1]
    assert run_ranks(pid, 2) == after


@pytest.mark.fast
def test_each_rank_gets_its_world_and_the_results_come_in_rank_order():
    results = run_ranks(add, 3, 10.0)
    assert [result[:2] for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert [result[2].item() for result in results] == [33.0] * 3  # 10 + 11 + 12


@pytest.mark.fast
def test_ranks_stand_between_calls_and_use_one_thread():
    assert run_ranks(pid, 2) == run_ranks(pid, 2)
    assert run_ranks(threads, 2) == [1, 1]


@pytest.mark.fast
def test_the_first_failing_rank_is_shown_first_with_its_traceback():
    with pytest.raises(RankError) as caught:
        run_ranks(raise_on, 2, 1)
    first, *others = str(caught.value).split("\nrank ")
    assert (
        first.startswith("rank 1 failed: Traceback")
        and "KeyError: 'raised by rank 1'" in first
        and "in raise_on" in first
    )
    assert all("Traceback" not in other for other in others)
    assert run_ranks(add, 2, 0.0)[0][2].item() == 1.0  # the pool works on


def test_a_hung_rank_is_named_and_replaced():
    before = run_ranks(pid, 2)
    with pytest.raises(RankError, match=r"did not return within 1 s: rank 1$"):
        run_ranks(hang_on, 2, 1, timeout=1.0)
    assert not any(psutil.pid_exists(old) for old in before)
    assert run_ranks(add, 2, 0.0)[1][2].item() == 1.0


def test_a_rank_that_exits_is_named_and_replaced():
    with pytest.raises(RankError, match="rank 1 failed: its process ended: exit code 7"):
        run_ranks(exit_on, 2, 1)
    assert len(set(run_ranks(pid, 2))) == 2


def test_a_result_that_cannot_be_pickled_is_said():
    with pytest.raises(RankError, match="cannot be pickled"):
        run_ranks(unpicklable, 1)


def test_disposable_ranks_return_and_can_be_killed():
    with disposable_ranks(add, 2, 1.0) as ranks:
        assert [rank.result()[2].item() for rank in ranks] == [3.0, 3.0]
        standing = set(run_ranks(pid, 2))
        assert not standing & {rank.pid for rank in ranks}
    with disposable_ranks(wait_forever, 2) as ranks:
        os.kill(ranks[1].pid, signal.SIGKILL)
        ranks[1].join(10)
        assert ranks[1].exitcode == -signal.SIGKILL
        with pytest.raises(RankError, match="rank 1 failed: its process ended: killed by SIGKILL"):
            ranks[1].result()
        with pytest.raises(RankError, match="did not return within 0 s: rank 0"):
            ranks[0].result(timeout=0.1)
    assert not psutil.pid_exists(ranks[0].pid)


@pytest.mark.parametrize("busy", [False, True])
def test_ranks_die_with_the_test_run(tmp_path: Path, busy: bool):
    """Also those that are in the middle of a call: what they hold open would keep who reads it waiting."""
    call = "with pool.disposable_ranks(wait_forever, 2) as ranks: time.sleep(0.5); print(*(each.pid for each in ranks)"
    script = tmp_path / "suite.py"
    script.write_text(
        "import os, signal, time\n"
        "from tests import pool\n"
        "from tests.test_pool import pid, wait_forever\n"
        "if __name__ == '__main__':\n"
        "    pool.preload(['tests.test_pool'])\n"
        f"    {call if busy else 'print(*pool.run_ranks(pid, 2)'}, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = str(Path(__file__).parents[1])
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
    )
    pids = [int(word) for word in run.stdout.split()]
    assert len(pids) == 2, run.stderr
    deadline = time.monotonic() + 10
    while (alive := [p for p in pids if psutil.pid_exists(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive


def test_an_orphan_and_a_forgotten_shared_memory_file_are_found():
    shared_memory = leftovers.SharedMemory()
    start_orphan = (
        "import subprocess, sys; "
        "print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
    )
    orphan = int(
        subprocess.run([sys.executable, "-c", start_orphan], capture_output=True, text=True, check=True).stdout
    )
    forgotten = Path(f"/dev/shm/shoal-forgotten-{os.getpid()}")
    forgotten.write_bytes(b"x")
    try:
        assert shared_memory.left() == [f"shared memory file {forgotten}"]
    finally:
        forgotten.unlink()
    run_ranks(pid, 1)
    assert orphan in [process.pid for process in leftovers._processes()]
    os.kill(orphan, signal.SIGKILL)
