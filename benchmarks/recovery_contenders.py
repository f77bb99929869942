"""The frameworks of `recovery`, each with 4 workers on two nodes of this host, as their own launchers start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import psutil

from benchmarks.recovery_running import WORKERS, Commit, Running, family, kill
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
NODES = 2


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
        return family(next(node for node in self.cluster.living if node is not leader).process.pid)

    def coordinator(self) -> list[psutil.Process]:
        return family(self.cluster.leader().process.pid)

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
        return family(self.starters[-1].pid)

    def coordinator(self) -> list[psutil.Process]:
        return family(self.starters[0].pid)


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

    def _newest(self) -> dict[int, subprocess.Popen[bytes]]:
        """The newest process of each place."""
        return dict(zip(self._places, self.starters[1:], strict=True))

    def node(self) -> list[psutil.Process]:
        newest = self._newest()
        return [psutil.Process(newest[place].pid) for place in (2, 3)]

    def coordinator(self) -> list[psutil.Process]:
        return [psutil.Process(self.starters[0].pid)]

    def come_back(self) -> None:
        time.sleep(0.1)  # what was killed has to be gone
        for place, starter in self._newest().items():
            if starter.poll() is not None:
                self._worker(place)

    def revive(self) -> None:
        self.come_back()


class TorchFTTuned(TorchFT):
    """TorchFT as above with --heartbeat_timeout_ms=1000."""

    options = ("--heartbeat_timeout_ms=1000",)


class RayTrain(Running):
    """Ray Train's TorchTrainer with max_failures=-1, on a Ray of one node: it has no second one to lose here."""

    comes_back = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.start(str(PEERS / "python"), "-m", "benchmarks.recovery_worker", "ray", str(folder))

    def coordinator(self) -> list[psutil.Process]:
        return [each for each in family(self.starters[0].pid) if "gcs_server" in each.name()]


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
        command = [str(PEERS / "python"), "-c", f"import {self.package}, shoal"]
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
    try:
        job = contender.start(folder)
    except BaseException:  # also what interrupts the benchmark
        kill(family(os.getpid())[1:])
        raise
    try:
        yield job
    finally:
        job.end()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return int(door.getsockname()[1])
