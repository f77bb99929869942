"""Runs a function on the simulated device, in a process of its own, or one a rank.

Each kind of device has a nursery (`nursery.py`): a process that has loaded the simulator and torch, and is forked for
each run, so that a run begins in a tenth of a second.
"""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from tests.device.simulator import build
from tests.device.simulator.trace import Trace, read

LAZY_EAGER_AND_SEEDS = ("lazy", "eager", 1, 2, 3)
"""Modes for what has to hold in all of them: see `simulate`."""

around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
"""Makes of each program what is run instead: tests/device/watch.py looks on there, tests/device/mutate.py changes the
sources."""
longest = math.inf
"""Seconds after which a program ends, whatever it was given."""

_nurseries: dict[str, Nursery] = {}


def why_not() -> str:
    """Why nothing can be simulated here; "" where it can."""
    return "" if build.compiler() else "no C++ compiler (g++) to build the simulated accelerator"


@dataclass(frozen=True)
class Rank:
    """What a program of several ranks is given; `folder` is one for all of them, for a FileStore."""

    rank: int
    size: int
    folder: str


@dataclass(frozen=True)
class Run:
    """What a program returned, what it did, and the traceback of its error ("" if there was none)."""

    result: Any
    trace: Trace
    error: str = ""


def simulate(
    program: Callable[..., Any],
    *args: Any,
    mode: str | int = "lazy",
    devices: int = 1,
    capacity: int = 1 << 34,
    name: str = "cuda",
    fails: bool = False,
    timeout: float = 60.0,
) -> Run:
    """Runs `program(*args)`, a function at the top of a module; its result is made of what can be pickled.

    - `mode`: "lazy" (nothing runs before somebody waits for it), "eager", or the seed of a random schedule
    - `devices`, `capacity`: how many there are, and bytes of memory of each
    - `name`: "cuda", or another name, a PrivateUse1 device
    - `fails`: whether an error of the program is an answer; else it is raised here
    - `timeout`: seconds after which it is killed
    """
    return _run(name, program, args, 0, mode, devices, capacity, fails, timeout, timeout)[0]


def simulate_ranks(
    program: Callable[..., Any],
    size: int,
    *args: Any,
    mode: str | int = "lazy",
    capacity: int = 1 << 34,
    name: str = "cuda",
    fails: bool = False,
    patience: float = 30.0,
    timeout: float = 60.0,
) -> list[Run]:
    """Runs `program(rank, *args)` in `size` processes, each of which sees as many devices and works on that of its
    own number; `rank` is a `Rank`. A call for which another rank does not come in `patience` seconds is reported.
    For the rest see `simulate`."""
    return _run(name, program, args, size, mode, size, capacity, fails, patience, timeout)


def end_nurseries() -> None:
    """Ends the processes that are kept for further runs."""
    while _nurseries:
        _nurseries.popitem()[1].end()


def nursery(name: str) -> Nursery:
    """The nursery of the device `name`, which is started for the first run."""
    if name not in _nurseries:
        _nurseries[name] = Nursery(name)
    return _nurseries[name]


def _run(name: str, program: Any, args: Any, ranks: int, *rest: Any) -> list[Run]:
    mode, devices, capacity, fails, patience, timeout = rest
    patience, timeout = min(patience, longest / 2), min(timeout, longest)
    program = program if around is None else around(program)
    schedule = ("random", mode) if isinstance(mode, int) else (mode, 0)
    settings = (devices, *schedule, capacity, patience, timeout)
    answers = nursery(name).ask((pickle.dumps((program, args)), ranks, *settings))
    runs = [Run(result, read(lines), error) for result, lines, error in answers]
    failed = [f"rank {rank}: {run.error}" for rank, run in enumerate(runs) if run.error]
    if failed and not fails:
        raise AssertionError("the simulated program failed\n" + "\n".join(failed))
    return runs


class Nursery:
    """The process that is forked for each run on the device `name`, and the pipe to it."""

    def __init__(self, name: str) -> None:
        build.library()  # compiled here, where an error is seen
        self._pipe, theirs = Pipe()
        root = Path(__file__).parents[3]
        path = os.pathsep.join([str(root / "src"), str(root), *sys.path])
        start = f"from tests.device.simulator.preload import preload; preload({name!r}); "
        start += f"from tests.device.simulator.nursery import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", start],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self._owner = os.getpid()

    def ask(self, request: tuple[Any, ...]) -> list[tuple[Any, list[str], str]]:
        self._pipe.send_bytes(pickle.dumps((sys.path, request)))
        answers: list[tuple[Any, list[str], str]] = pickle.loads(self._pipe.recv_bytes())
        return answers

    def end(self) -> None:
        """Ends it, unless this process is a fork of its owner."""
        if os.getpid() == self._owner:
            self._pipe.close()
            self._process.wait()
