"""Question `soak`: does a job whose ranks and nodes are killed, leave and join for a long time grow?

    python -m benchmarks.soak [--minutes 20] [--every 30] [--seed 0] [--nodes 3]

`shoal train --nodes` with a small GPT on loopback. After about every `--every` seconds of training a draw of `--seed`
kills a rank (SIGKILL), also with the process that forks ranks, kills a node with its ranks, has one leave (SIGTERM), or
lets one join; the first node stays, but for its ranks. While it trains undisturbed, from 10 s after a change on, each
second is read: resident memory, descriptors and threads of supervisors and ranks that are at least 20 s old; processes;
files in shared memory and in the temporary folder, but for those of killed processes that the next start of shoal
sweeps away. One slope is fitted to all samples of a kind, with a level for each process and number of nodes
(benchmarks/growth.py). What it adds over the longest time that a process was watched at one number of nodes may be 3%
of its memory (or 8 MiB), and half a descriptor, thread, process or file. No process and no file may be left at the end.
Writes results/soak.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from benchmarks import harness
from benchmarks.growth import Growth, Sample, growth
from shoal.chaos.nodes import ranks_of
from shoal.launch.fork_server import NAME as FORK_SERVER
from shoal.launch.scratch import sweep

WARM_UP, SETTLE, STUCK, LEAVE = 20.0, 10.0, 400.0, 60.0  # seconds
MIB = 2**20
TOLERANCES = {"memory": (8.0 * MIB, 0.03)}  # as `growth` takes them
A_HALF = (0.5, 0.0)
MARK = "SHOAL_SOAK"  # in the environment of all processes of a soak
JOB = """
[model]
name = "gpt"
layers = 2
d_model = 64
heads = 4
[data]
source = "corpus"
sequence = 64
validation = 0.1
[train]
steps = 100000000
global_batch = 24
microbatch = 2
lr = 1e-3
schedule = "constant"
warmup = 0
[run]
trackers = []
nproc = 1
save_every = 50
"""


class Node:
    """A supervisor and its ranks, as the command line starts them in `folder`."""

    def __init__(self, folder: Path, number: int, mark: str, *args: str) -> None:
        self.log = folder / f"node{number}.log"
        env = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")}
        env |= {"XDG_CACHE_HOME": str(folder / "cache"), "SHOAL_SECRET": mark}
        with self.log.open("wb") as file:
            command = [sys.executable, "-m", "shoal.cli", "train", *args]
            self.process = subprocess.Popen(command, cwd=folder, env=env, stdout=file, stderr=file)

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def ranks(self) -> list[psutil.Process]:
        return ranks_of(self.process.pid)

    def starts_ranks(self) -> list[psutil.Process]:
        """The process that forks them, where it runs."""
        with suppress(psutil.Error):
            return [each for each in psutil.Process(self.process.pid).children() if each.name() == FORK_SERVER]
        return []


class Metrics:
    """What a run has written of its progress, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self.step = self.generations = self.lost = 0
        self.worlds = list[int]()

    def read(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            lines = file.read()
        whole = lines.rfind(b"\n") + 1
        self._at += whole
        for line in lines[:whole].splitlines():
            record = json.loads(line)
            if record["kind"] == "step":
                self.step = record["step"]
            if record["kind"] == "membership":
                self.generations, self.lost = self.generations + 1, self.lost + record["lost"]
                self.worlds.append(record["world"])


@dataclass
class Soak:
    """A job under way in `folder`, with all that was seen of it."""

    folder: Path
    most: int
    draw: random.Random
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    nodes: list[Node] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    shared_before: set[str] = field(default_factory=lambda: shared_memory())
    _count: int = 0
    _port: str = ""

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.folder / "runs/job/metrics.jsonl")
        (self.folder / "tmp").mkdir()
        (self.folder / "corpus").mkdir()
        for number in range(20):
            text = "\n".join(f"{number} + {i} = {number + i}" for i in range(200))
            (self.folder / "corpus" / f"{number:02}.txt").write_text(text)
        (self.folder / "job.toml").write_text(JOB)

    @property
    def now(self) -> float:
        return time.monotonic() - self.started

    def found(self) -> None:
        """Starts the first node, and waits until it says where others join."""
        first = self._start("job.toml", "--nodes", f"1:{self.most}")
        self.wait(lambda: re.search(r"--join 127.0.0.1:(\d+)", first.log.read_text()), "the first node does not listen")
        found = re.search(r"--join 127.0.0.1:(\d+)", first.log.read_text())
        assert found is not None
        self._port = found[1]

    def _start(self, *args: str) -> Node:
        self.nodes.append(Node(self.folder, self._count, self.mark, *args))
        self._count += 1
        return self.nodes[-1]

    def happen(self) -> None:
        """Does one of the things that are possible now."""
        self.nodes = [each for each in self.nodes if each.lives]
        others, choices = self.nodes[1:], list[str]()
        choices += ["kill a rank", "kill a rank", "kill a rank and what starts ranks"]
        choices += ["kill a node", "a node leaves"] * bool(others)
        choices += ["a node joins"] * (3 if len(self.nodes) < self.most else 0)
        what = self.draw.choice(choices)
        event = {"seconds": round(self.now, 1), "what": what, "step": self.metrics.step, "nodes": len(self.nodes)}
        if what == "a node joins":
            self._start("--join", f"127.0.0.1:{self._port}", "--nproc", "1")
        elif what.startswith("kill a rank"):
            node = self.draw.choice([node for node in self.nodes if node.ranks()])
            for each in node.starts_ranks() if "starts" in what else []:
                each.kill()
            self.draw.choice(node.ranks()).kill()
        elif what == "kill a node":
            self.draw.choice(others).process.kill()
        else:
            self.draw.choice(others).process.send_signal(signal.SIGTERM)
        self.events.append(event)

    def train_on(self) -> None:
        """Waits until steps have been made in a generation that began after the last event."""
        generations = self.metrics.generations
        began = self.now
        self.wait(lambda: self.metrics.generations > generations, "no further generation")
        step = self.metrics.step
        self.wait(lambda: self.metrics.step > step + 1, "no further step")
        if self.events:
            self.events[-1]["until it trains"] = round(self.now - began, 1)

    def wait(self, until: Any, why: str) -> None:
        """Samples until a condition holds. Raises RuntimeError where that takes too long, or the first node ends."""
        deadline = self.now + STUCK
        while not until():
            self._check_first(why, self.now > deadline)
            time.sleep(1.0)
            self.metrics.read()

    def _check_first(self, why: str, stuck: bool = False) -> None:
        if stuck or not self.nodes[0].lives:
            raise RuntimeError(f"{why}:\n{self.nodes[0].log.read_text()[-3000:]}")

    def rest(self, seconds: float) -> None:
        """Lets the job train, and looks at it for so many seconds, not counting those just after a change."""
        watched, settled, generations = 0.0, self.now + SETTLE, self.metrics.generations
        while watched < seconds:
            self._check_first("it has ended")
            time.sleep(1.0)
            self.metrics.read()
            if self.metrics.generations > generations:
                settled, generations = self.now + SETTLE, self.metrics.generations
            if self.now >= settled:
                watched += 1.0
                self.look()

    def look(self) -> None:
        """Takes a sample of everything."""
        alive = sum(node.lives for node in self.nodes)
        processes = self.processes()
        self._take("host", alive, {"processes": len(processes), **{k: len(each) for k, each in self.files().items()}})
        supervisors = {node.process.pid: "supervisor" for node in self.nodes}
        supervisors[self.nodes[0].process.pid] = "first supervisor"
        for process in processes:
            with suppress(psutil.Error), process.oneshot():
                if time.time() - process.create_time() >= WARM_UP:
                    values = {"descriptors": process.num_fds(), "threads": process.num_threads()}
                    values["memory"] = process.memory_info().rss
                    level = (process.pid, process.create_time(), alive)
                    self._take(supervisors.get(process.pid, "rank"), level, values)

    def _take(self, kind: str, level: Any, values: Mapping[str, float]) -> None:
        for quantity, value in values.items():
            self.samples.setdefault(f"{kind}, {quantity}", []).append(Sample(level, self.now, value))

    def files(self) -> dict[str, list[str]]:
        """Returns what is in shared memory since the beginning, and in the temporary folder beside torch's own."""
        folder = self.folder / "tmp"
        with patch.object(tempfile, "tempdir", str(folder)):
            sweep()
        temporary = [str(path.relative_to(folder)) for path in folder.rglob("*")]
        return {
            "shared memory": sorted(shared_memory() - self.shared_before),
            "temporary files": sorted(name for name in temporary if not name.startswith("torchinductor")),
        }

    def end(self) -> int:
        """Ends the job as Ctrl-C does; returns the first node's exit code."""
        self.nodes[0].process.send_signal(signal.SIGINT)
        for node in self.nodes:
            node.process.wait(LEAVE)
        return self.nodes[0].process.returncode

    def processes(self) -> list[psutil.Process]:
        """Returns all processes of this soak that live."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill(self) -> None:
        """Ends what is left, after a failure too."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        for node in self.nodes:
            node.process.wait()

    def growths(self) -> dict[str, Growth]:
        return {
            name: growth(samples, *TOLERANCES.get(name.rpartition(", ")[2], A_HALF))
            for name, samples in sorted(self.samples.items())
        }


@contextmanager
def begun(most: int, seed: int) -> Iterator[Soak]:
    """Gives a soak whose job trains; whatever is left of it is ended."""
    with tempfile.TemporaryDirectory(prefix="shoal-soak-") as folder:
        soak = Soak(Path(folder), most, random.Random(seed))
        try:
            soak.found()
            soak.train_on()
            yield soak
        finally:
            soak.kill()


def shared_memory() -> set[str]:
    """Returns the files in shared memory, but for semaphores of multiprocessing."""
    return {str(path) for path in Path("/dev/shm").rglob("*") if not path.name.startswith("sem.mp-")}


def run(minutes: float, every: float, most: int, seed: int) -> dict[str, Any]:
    """Soaks a job for that long. Returns the record."""
    with begun(most, seed) as soak:
        until = soak.now + 60 * minutes
        while soak.now < until:
            soak.rest(min(every * soak.draw.uniform(0.5, 1.5), until - soak.now))
            if soak.now < until:
                soak.happen()
                soak.train_on()
        code = soak.end()
        processes = [" ".join(process.cmdline()) for process in soak.processes()]
        left = {"processes": processes, **soak.files()}
        found = soak.growths()
        failed = [name for name, each in found.items() if not each.is_none]
        failed += [f"left: {name}" for name, things in left.items() if things]
        failed += [f"exit code {code}"] if code not in (0, 130) else []
        return {
            "verdict": "no growth" if not failed else f"growth or left behind: {', '.join(failed)}",
            "minutes": soak.now / 60,
            "steps": soak.metrics.step,
            "generations": soak.metrics.generations,
            "steps trained again": soak.metrics.lost,
            "events": soak.events,
            "growth": {name: {**asdict(each), "none": each.is_none} for name, each in found.items()},
            "left": left,
            "exit code": code,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds that are watched between changes, about")
    parser.add_argument("--nodes", type=int, default=3, help="the most at a time")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = run(arguments.minutes, arguments.every, arguments.nodes, arguments.seed)
    path = harness.write_record("soak", vars(arguments), result)
    for name, each in result["growth"].items():
        unit, of = (MIB, " MiB") if name.endswith("memory") else (1, "")
        print(
            f"{name:32} {each['mean'] / unit:8.1f}{of}, {each['grown'] / unit:+8.3f} in {each['span']:6.0f} s, "
            f"at most {each['tolerance'] / unit:.1f}; {each['samples']} samples of {each['levels']} levels"
        )
    print(f"{len(result['events'])} events, {result['generations']} generations, {result['steps']} steps")
    print(f"{result['verdict']} ({path})")


if __name__ == "__main__":
    main()
