"""The frameworks of `recovery`, each with 4 workers on two nodes of this host, as their own launchers start them.

All are held from outside alike: processes are found, killed and stopped, and committed steps are read from files.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import psutil

from benchmarks.recovery_worker import (
    GLOBAL_BATCH,
    HEADS,
    LAYERS,
    LEARNING_RATE,
    SAVE,
    SEQUENCE,
    STEPS,
    WIDTH,
)
from shoal.chaos.nodes import Cluster
from shoal.report.follow import Follower
from shoal.report.metrics import MembershipRecord, StepRecord

PEERS = Path(__file__).parents[1] / "build" / "peers" / "bin"
"""A virtual environment with torchft and Ray beside this torch (see `recovery`)."""
WORKERS, NODES = 4, 2


@dataclass(frozen=True)
class Commit:
    """A committed step: Unix time, its number, how many workers made it."""

    time: float
    step: int
    world: int


class Running:
    """A contender that trains in `folder`.

    starters: the processes that were started, in order; `nodes[i]` are the places of those that are node i.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.starters: list[subprocess.Popen[bytes]] = []
        self._read: dict[Path, int] = {}
        self._commits: list[Commit] = []

    def start(self, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Starts a process, whose output goes to a file."""
        with (self.folder / f"process{len(self.starters)}.log").open("wb") as log:
            given = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=given, start_new_session=True)
        self.starters.append(process)
        return process

    def commits(self) -> list[Commit]:
        """All commits so far, each step once from each worker, in the order of their times."""
        for path in self.folder.glob("commits-*"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                when, step, world = line.split()
                self._commits.append(Commit(float(when), int(step), int(world)))
        self._commits.sort(key=lambda each: each.time)
        return self._commits

    def workers(self) -> list[psutil.Process]:
        """The processes that train, the oldest first."""
        found = []
        for path in self.folder.glob("commits-*"):
            with suppress(psutil.Error):
                process = psutil.Process(int(path.name.rpartition("-")[2]))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return sorted(found, key=lambda each: (each.create_time(), each.pid))

    def node(self) -> list[psutil.Process]:
        """The processes of the node that is lost: not the one that coordinates."""
        raise NotImplementedError

    def coordinator(self) -> list[psutil.Process]:
        """The process that coordinates, with those that live and die with it on its node."""
        raise NotImplementedError

    def come_back(self) -> None:
        """Starts the node again that was lost."""
        raise NotImplementedError

    def revive(self) -> None:
        """Starts a worker again that was killed, where the framework leaves that to a scheduler."""

    def end(self) -> None:
        """Kills all that is left."""
        left = [process for starter in self.starters for process in _family(starter.pid)] + self.workers()
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        for starter in self.starters:
            starter.wait()


def _family(pid: int) -> list[psutil.Process]:
    """The process and all below it."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


JOB = f"""
[model]
name = "gpt"
layers = {LAYERS}
d_model = {WIDTH}
heads = {HEADS}
[data]
source = "CORPUS"
sequence = {SEQUENCE}
validation = 0.0
[train]
steps = {STEPS}
global_batch = {GLOBAL_BATCH}
microbatch = 1
lr = {LEARNING_RATE}
optimizer = {{name = "sgd", momentum = 0.9}}
schedule = "constant"
warmup = 0
clip = 0.0
[run]
trackers = []
save_every = {SAVE}
"""


class Shoal(Running):
    """`shoal train --nodes 1:2`, 2 ranks each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "corpus").mkdir()
        for number in range(20):
            lines = "\n".join(f"{number} + {i} = {number + i}" for i in range(40))
            (folder / "corpus" / f"{number}.txt").write_text(lines)
        (folder / "job.toml").write_text(JOB.replace("CORPUS", str(folder / "corpus")))
        env = {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        self.cluster = Cluster(folder / "job.toml", [], (1, NODES), WORKERS // NODES, folder / "nodes", env)
        self._follower, self._world, self._taken = Follower(self.cluster.run_dir / "metrics.jsonl"), 0, 0
        self.cluster.join()

    def commits(self) -> list[Commit]:
        self._follower.read()
        for record in self._follower.records[self._taken :]:
            if isinstance(record, MembershipRecord):
                self._world = record.world
            elif isinstance(record, StepRecord):
                self._commits.append(Commit(record.time, record.step, self._world))
        self._taken = len(self._follower.records)
        return self._commits

    def workers(self) -> list[psutil.Process]:
        return [rank for node in self.cluster.living for rank in node.ranks()]

    def node(self) -> list[psutil.Process]:
        leader = self.cluster.leader()
        return _family(next(node for node in self.cluster.living if node is not leader).process.pid)

    def coordinator(self) -> list[psutil.Process]:
        return _family(self.cluster.leader().process.pid)

    def come_back(self) -> None:
        self.cluster.join()

    def end(self) -> None:
        self.cluster.end()


class Torchrun(Running):
    """torchrun with two agents, which meet in the store of the first (c10d), and any number of restarts."""

    variables: ClassVar[dict[str, str]] = {}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._port = _free_port()
        for _ in range(NODES):
            self.come_back()
            time.sleep(0.5)  # the first one has the store

    def come_back(self) -> None:
        self.start(
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes=1:{NODES}",
            f"--nproc-per-node={WORKERS // NODES}",
            "--max-restarts=1000",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self._port}",
            "--rdzv-id=job",
            f"--rdzv-conf=is_host={int(not self.starters)}",
            "-m",
            "benchmarks.recovery_worker",
            "torchrun",
            str(self.folder),
            env=self.variables,
        )

    def node(self) -> list[psutil.Process]:
        return _family(self.starters[1].pid)

    def coordinator(self) -> list[psutil.Process]:
        return _family(self.starters[0].pid)


class TorchrunOwnStore(Torchrun):
    """torchrun as above with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."""

    variables: ClassVar[dict[str, str]] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class TorchFT(Running):
    """TorchFT: a lighthouse, and 4 replica groups of one process each; nobody but `come_back` starts one again."""

    options: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._port, self._places = _free_port(), list[int]()
        bind = f"--bind=127.0.0.1:{self._port}"
        self.start(str(PEERS / "torchft_lighthouse"), bind, "--min_replicas=1", *self.options)
        time.sleep(0.5)
        for place in range(WORKERS):
            self._worker(place)

    def _worker(self, place: int) -> None:
        address = f"http://127.0.0.1:{self._port}"
        worker = ("-m", "benchmarks.recovery_worker", "torchft", str(self.folder), str(place), address)
        self.start(str(PEERS / "python"), *worker)
        self._places.append(place)

    def node(self) -> list[psutil.Process]:
        return [psutil.Process(starter.pid) for starter in self.starters[3:5]]

    def coordinator(self) -> list[psutil.Process]:
        return [psutil.Process(self.starters[0].pid)]

    def come_back(self) -> None:
        for place in (2, 3):
            self._worker(place)

    def revive(self) -> None:
        time.sleep(0.1)  # it has to be gone
        newest = dict(zip(self._places, self.starters[1:], strict=True))
        for place, starter in newest.items():
            if starter.poll() is not None:
                self._worker(place)


class TorchFTTuned(TorchFT):
    """TorchFT as above with --heartbeat_timeout_ms=1000."""

    options = ("--heartbeat_timeout_ms=1000",)


class RayTrain(Running):
    """Ray Train's TorchTrainer with max_failures=-1, on a Ray of one node: it has no second one to lose here."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.start(str(PEERS / "python"), "-m", "benchmarks.recovery_worker", "ray", str(folder))

    def coordinator(self) -> list[psutil.Process]:
        return [each for each in _family(self.starters[0].pid) if "gcs_server" in each.name()]


@dataclass(frozen=True)
class Contender:
    """How a contender is started, the package that it needs, and what it cannot be asked."""

    start: Callable[[Path], Running]
    package: str = ""
    without: tuple[str, ...] = field(default=())

    @property
    def note(self) -> str:
        """What it is."""
        return " ".join((self.start.__doc__ or "").split())

    def missing(self) -> str:
        """Why it cannot run here, or ""."""
        if not self.package:
            return ""
        command = [str(PEERS / "python"), "-c", f"import {self.package}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            return f"{self.package} is not installed: {error}"
        return "" if done.returncode == 0 else f"{self.package} cannot be imported: {done.stderr.strip()[-200:]}"


CONTENDERS = {
    "shoal": Contender(Shoal),
    "torchrun": Contender(Torchrun),
    "torchrun own store": Contender(TorchrunOwnStore),
    "torchft": Contender(TorchFT, "torchft"),
    "torchft tuned": Contender(TorchFTTuned, "torchft"),
    "ray": Contender(RayTrain, "ray.train", ("node", "rejoin")),
}


@contextmanager
def running(contender: Contender, folder: Path) -> Iterator[Running]:
    """A contender that has been started; nothing of it is left afterwards."""
    folder.mkdir(parents=True)
    job = contender.start(folder)
    try:
        yield job
    finally:
        job.end()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return int(door.getsockname()[1])


def kill(processes: list[psutil.Process], number: signal.Signals = signal.SIGKILL) -> None:
    """Sends a signal to all at once."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)
