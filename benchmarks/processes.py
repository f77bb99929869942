"""A group of worker processes that stays alive between turns: one contender of a benchmark.

Each process builds its contender once, warms up, then waits for turns. A waiting process is stopped by SIGSTOP: gloo's
event loop wakes 100 times a second, and the waiting ranks of ten contenders took 4% of a core from the one being timed.
The processes find each other as any launched job does: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment,
with the store in the launcher, here the benchmark's own process.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch

Step = Callable[..., object]
"""One training step of one rank; whatever else a turn is given comes as its arguments."""

Build = Callable[..., Step]
"""Makes a rank's step from keyword arguments, in the process that will run it. Must be importable: it crosses a
spawn."""

SETTLE_STEPS = 1
"""Untimed steps at the start of a turn: memory given back at the end of the last turn comes back, caches fill again."""


def stay(rank: int) -> None:
    """Leaves a rank's process where it was started."""


@dataclass(frozen=True)
class Site:
    """Where the ranks live: `address` of the benchmark's own process and name of the network `interface`, both as the
    ranks see them; `enter(rank)` is called in each rank's process before all else, and must be importable."""

    address: str = "127.0.0.1"
    interface: str = "lo"
    enter: Callable[[int], None] = stay


class ProcessGroup:
    """`size` processes, one a rank, each running the step that `build(**arguments)` makes, with `threads` compute
    threads.

    Raises RuntimeError with the rank's traceback when a rank fails, and kills the others.
    """

    def __init__(
        self,
        build: Build,
        arguments: dict[str, Any],
        *,
        size: int = 2,
        threads: int = 1,
        warm_up: int = 3,
        site: Site = Site(),
    ) -> None:
        self._store = torch.distributed.TCPStore(
            site.address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5)
        )
        os.environ["OMP_NUM_THREADS"] = str(threads)  # read by the children when they load torch
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            here, there = context.Pipe()
            environment = rank_environment(rank, size, self._store.port, site)
            process = context.Process(
                target=_serve, args=(there, site.enter, environment, threads, build, arguments, warm_up), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._receive()
        self._signal(signal.SIGSTOP)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def turn(self, steps: int, *arguments: Any) -> list[float]:
        """Runs SETTLE_STEPS untimed and then `steps` timed steps on every rank at once, each called with `arguments`;
        returns the milliseconds of each timed step, as the mean over the ranks.

        For ranks that exchange, the ranks' times agree. For ranks that do not, the mean is the strict choice: the
        greater of two would count every hiccup of either rank and make the limit look slower than it is.
        """
        per_rank = self.turns([steps] * len(self._pipes), *arguments)
        return [sum(times) / len(times) for times in zip(*per_rank, strict=True)]

    def turns(self, steps: Sequence[int], *arguments: Any) -> list[list[float]]:
        """The same with as many timed steps as `steps` says for each rank; returns each rank's milliseconds by step."""
        return self._ask([("turn", (count, arguments)) for count in steps])

    def call(self, function: Callable[[], Any]) -> list[Any]:
        """Runs an importable `function()` in every process; returns the results by rank."""
        return self._ask([("call", function)] * len(self._pipes))

    def cpu_seconds(self) -> float:
        """CPU time that the processes have used so far, all their threads, user and system."""
        times = [psutil.Process(pid).cpu_times() for pid in self.pids]
        return sum(time.user + time.system for time in times)

    def close(self) -> None:
        """Ends the processes. They have nothing to save, and some peers hang in their own tear-down: so by SIGKILL."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, messages: Sequence[tuple[str, Any]]) -> list[Any]:
        self._signal(signal.SIGCONT)
        for pipe, message in zip(self._pipes, messages, strict=True):
            pipe.send(message)
        answers = self._receive()
        self._signal(signal.SIGSTOP)
        return answers

    def _signal(self, number: int) -> None:
        for pid in self.pids:
            os.kill(pid, number)

    def _receive(self) -> list[Any]:
        results: dict[int, Any] = {}
        waiting = set(range(len(self._pipes)))
        while waiting:
            ready = multiprocessing.connection.wait([self._pipes[rank] for rank in waiting])
            for rank in [rank for rank in waiting if self._pipes[rank] in ready]:
                waiting.remove(rank)
                results[rank] = self._answer(rank)
        return [results[rank] for rank in range(len(self._pipes))]

    def _answer(self, rank: int) -> Any:
        try:
            ok, value = self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join()
            ok, value = False, f"exit code {self._processes[rank].exitcode}, no message"
        if not ok:
            self.close()
            raise RuntimeError(f"rank {rank} of the contender failed:\n{value}")
        return value


def rank_environment(rank: int, size: int, port: int, site: Site) -> dict[str, str]:
    """What a launcher sets for a rank of one host. TORCHELASTIC_USE_AGENT_STORE says that the store's server is not
    rank 0's."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": site.address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": site.interface,
    }


def _serve(
    pipe: Connection,
    enter: Callable[[int], None],
    environment: dict[str, str],
    threads: int,
    build: Build,
    arguments: dict[str, Any],
    warm_up: int,
) -> None:
    """The life of one rank: build, warm up, then turns until it is killed."""
    _die_with_parent()
    os.environ.update(environment)
    os.dup2(2, 1)  # what libraries print goes to stderr: stdout is the benchmark's table
    sys.stdout = sys.stderr
    torch.set_num_threads(threads)
    try:
        enter(int(environment["RANK"]))
        step = build(**arguments)
        for _ in range(warm_up):
            step()
        pipe.send((True, None))
        while True:
            command, argument = pipe.recv()
            pipe.send((True, _timed(step, *argument) if command == "turn" else argument()))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise


def _die_with_parent() -> None:
    """A stopped process would outlive a killed benchmark for ever."""
    PR_SET_PDEATHSIG = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _timed(step: Step, steps: int, arguments: tuple[Any, ...]) -> list[float]:
    for _ in range(SETTLE_STEPS):
        step(*arguments)
    gc.collect()
    gc.disable()  # a collection in the middle of one contender's turn would be luck
    marks = [time.perf_counter()]
    for _ in range(steps):
        step(*arguments)
        marks.append(time.perf_counter())
    gc.enable()
    trim_memory()
    return [(after - before) * 1e3 for before, after in itertools.pairwise(marks)]


def trim_memory() -> None:
    """Gives freed memory back to the system, so that all contenders fit in memory side by side while they wait."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
