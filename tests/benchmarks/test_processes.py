"""A contender's processes: kept alive, stopped while they wait, killed when one fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil
import pytest
import torch.distributed as dist

from benchmarks.processes import ProcessGroup, Site, rank_environment


def sleeper(rank_1_extra: float) -> Callable[[], None]:
    """Rank 0 sleeps 20 ms a step, rank 1 longer; they meet once, at the start."""
    dist.init_process_group("gloo")
    dist.barrier()
    seconds = 0.02 + rank_1_extra * dist.get_rank()
    return lambda: time.sleep(seconds)


def napper() -> Callable[[float], None]:
    """Sleeps as long as its turn says, if it was entered."""
    assert os.environ["ENTERED"] == os.environ["RANK"]
    return time.sleep


def enter(rank: int) -> None:
    os.environ["ENTERED"] = str(rank)


def failing() -> Callable[[], None]:
    """Rank 1 cannot be built; rank 0 waits for ever."""
    if os.environ["RANK"] == "1":
        raise KeyError("no such case")
    time.sleep(600)
    return lambda: None


def stopped(pids: list[int]) -> bool:
    """Whether the processes stop within ten seconds: a signal arrives soon, not at once."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids):
            return True
        time.sleep(0.01)
    return False


def test_turns_are_means_over_the_ranks_and_waiting_ranks_are_stopped() -> None:
    with ProcessGroup(sleeper, {"rank_1_extra": 0.04}) as group:
        assert stopped(group.pids)
        times = group.turn(3)
        assert len(times) == 3
        assert all(time >= 40 for time in times)  # (20 + 60) / 2: a sleep may take longer, never less
        assert group.call(os.getpid) == group.pids
        assert stopped(group.pids)
        pids = group.pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_ranks_enter_their_site_and_each_takes_its_own_number_of_steps() -> None:
    with ProcessGroup(napper, {}, warm_up=0, site=Site(enter=enter)) as group:
        one, three = group.turns([1, 3], 0.03)
    assert (len(one), len(three)) == (1, 3)
    assert all(time >= 30 for time in one + three)


@pytest.mark.fast
def test_the_environment_is_that_of_the_site() -> None:
    environment = rank_environment(1, 2, 4000, Site("10.0.0.9", "eth7"))
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"], environment["RANK"]) == ("10.0.0.9", "4000", "1")
    assert environment["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    before = psutil.Process().children()
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 .*KeyError: 'no such case'"):
        ProcessGroup(failing, {})
    children = [
        child
        for child in psutil.Process().children()
        if child not in before and "spawn_main" in " ".join(child.cmdline())
    ]
    assert children == []
