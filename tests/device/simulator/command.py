"""Runs a script of Python on the simulated CUDA, in it and in each process of Python that it starts.

    python3 -m tests.device.simulator -m benchmarks.gpu.exchange --checks

What the processes have reported is printed behind what they print themselves.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.device.simulator import build
from tests.device.simulator.trace import Report, Trace, read

FOLDER, DEVICES = "SIMULATED_FOLDER", "SIMULATED_DEVICES"
"""Variables of the processes: where they meet and leave their traces, and how many devices they see."""
PATIENCE = 120.0
CAPACITY = 1 << 34


@dataclass(frozen=True)
class Ended:
    """A script that has ended: its exit code, what it has printed, and what its processes have done."""

    code: int
    output: str
    traces: list[Trace]

    @property
    def defects(self) -> list[Report]:
        return [defect for trace in self.traces for defect in trace.defects]


def simulate_script(arguments: Sequence[str], devices: int = 1, timeout: float = 600.0, shown: bool = False) -> Ended:
    """Runs `python ARGUMENTS` on `devices` devices with lazy streams; `shown`: what it prints goes to the terminal."""
    build.library()  # once, and not in each process
    here = Path(__file__).parent
    root = here.parents[2]
    path = [here / "everywhere", root / "src", root, *sys.path]
    with TemporaryDirectory(prefix="simulated-") as folder:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
        environment |= {FOLDER: folder, DEVICES: str(devices)}
        to = None if shown else subprocess.PIPE
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, stdout=to, stderr=to and subprocess.STDOUT, timeout=timeout
        )
        traces = [read(file.read_text().splitlines()) for file in sorted(Path(folder).glob("*.trace"))]
    return Ended(done.returncode, (done.stdout or b"").decode(), traces)


def begin() -> None:
    """Makes this process, which has just started, one of such a script."""
    from tests.device.simulator.preload import preload

    preload("cuda")
    import torch

    from tests.device.simulator import group

    folder = os.environ[FOLDER]
    group.meet_in(folder, PATIENCE)
    torch.ops.sim.configure(int(os.environ[DEVICES]), "lazy", 0, CAPACITY, True)

    def end() -> None:
        group.leave()
        Path(folder, f"{os.getpid()}.trace").write_text("\n".join(torch.ops.sim.trace()))

    atexit.register(end)
