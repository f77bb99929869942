"""What `recovery` asks of an undisturbed job: what nodes that may come and go, or buddies, add to a step.

Whether nodes may come and go is decided as a job begins: jobs with and without take turns. Buddies are for a plan that
changes while it trains: one job takes turns with and without them, so that what else the machine does, and what a
process happens to find in its memory, is the same for both.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recovery_contenders import JOB
from benchmarks.recovery_running import WORKERS, family
from shoal.report.follow import Follower
from shoal.report.metrics import StepRecord

BLOCK, WARM = 24, 12
"""Steps with or without buddies before the other turn comes; and those of them that are not counted: snapshots come
every 6 steps, and until the third one each needs new memory."""
OF_THOUSAND = 120
"""Steps of the job with buddies for each thousand that are asked for: they are a hundred times longer."""
LARGER = {  # 2,048 tokens a rank: with fewer, what is sent for each weight is a larger part of the step
    "model.layers": "4",
    "model.d_model": "256",
    "model.heads": "4",
    "data.sequence": "256",
    "train.global_batch": "32",
    "train.microbatch": "8",
    "train.optimizer": "'adamw'",
    "plan.zero": "3",
}


@dataclass(frozen=True)
class Step:
    """Milliseconds that a mean step takes, and those of the cores that all processes of the job are busy for it."""

    milliseconds: float
    cpu: float


def steady(folder: Path, steps: int, rounds: int) -> dict[str, dict[str, Any]]:
    """What a step of Shoal's with 4 ranks of this host takes, without and with nodes that may come and go (`rounds`
    jobs of `steps` steps each), and without and with buddies."""
    (folder / "corpus").mkdir(parents=True)
    text = "\n".join(f"{i} + {i} = {2 * i}" for i in range(4000))
    (folder / "corpus" / "all.txt").write_text(text)
    (folder / "job.toml").write_text(JOB.replace("CORPUS", str(folder / "corpus")))
    return {"nodes": _nodes(folder, steps, rounds), "buddies": _buddies(folder, steps)}


def _nodes(folder: Path, steps: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[Step]] = {"without": [], "with": []}
    for number in range(rounds):
        for which, more in (("without", []), ("with", ["--nodes=1:1"]))[:: -1 if number % 2 else 1]:
            trace = _trained(folder, f"nodes-{which}-{number}", steps, {}, more)
            found[which].append(trace.mean(steps // 4, steps * 9 // 10))
    return compared(found["without"], found["with"])


def _buddies(folder: Path, steps: int) -> dict[str, Any]:
    pairs = max(1, steps * OF_THOUSAND // 1000 // (2 * BLOCK))
    turns = range(2 * pairs + 1)
    changes = [f"{{step = {turn * BLOCK}, plan = {{buddy = {_buddy(turn)}}}}}" for turn in turns[1:]]
    trace = _trained(folder, "buddies", len(turns) * BLOCK, {**LARGER, "run.at": f"[{', '.join(changes)}]"}, [])
    blocks = [trace.mean(turn * BLOCK + WARM, (turn + 1) * BLOCK) for turn in turns]
    beside = [_between(one, other) for one, other in zip(blocks[::2], blocks[2::2], strict=False)]
    return compared(beside, blocks[1::2])


def _buddy(turn: int) -> str:
    return "'auto'" if turn % 2 else "0"


def _between(one: Step, other: Step) -> Step:
    """What a step took in mean, before and after those with which it is compared."""
    return Step((one.milliseconds + other.milliseconds) / 2, (one.cpu + other.cpu) / 2)


class Trace:
    """The end of each step of a job, and the CPU seconds of all its processes then (read within 10 ms)."""

    def __init__(self) -> None:
        self._seconds, self._cpu = dict[int, float](), dict[int, float]()

    def add(self, step: int, seconds: float, cpu: float) -> None:
        """Notes that `step` has taken so long, and what CPU time there was at its end."""
        self._seconds[step], self._cpu[step] = seconds, cpu

    def mean(self, after: int, until: int) -> Step:
        """A mean step of those that come after the first `after` and are among the first `until` ones."""
        times = [seconds for step, seconds in self._seconds.items() if after < step <= until]
        seen = sorted(step for step in self._cpu if after <= step <= until)
        busy = (self._cpu[seen[-1]] - self._cpu[seen[0]]) / (seen[-1] - seen[0])
        return Step(1e3 * statistics.fmean(times), 1e3 * busy)


def _trained(folder: Path, name: str, count: int, values: Mapping[str, str], more: Sequence[str]) -> Trace:
    run = folder / name
    given = {**values, "run.dir": repr(str(run)), "train.steps": str(count), "run.save_every": "0"}
    command = [sys.executable, "-m", "shoal.cli", "train", str(folder / "job.toml"), f"--nproc={WORKERS}", *more]
    command += [f"--set={key}={value}" for key, value in given.items()]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    follower, read, trace = Follower(run / "metrics.jsonl"), 0, Trace()
    while job.poll() is None:
        if follower.read():
            cpu = _cpu_seconds(job.pid)
            for each in follower.records[read:]:
                if isinstance(each, StepRecord):
                    trace.add(each.step, each.seconds, cpu)
            read = len(follower.records)
        time.sleep(0.01)
    if job.returncode:
        raise RuntimeError(f"{command} ended with exit code {job.returncode}")
    return trace


def _cpu_seconds(pid: int) -> float:
    times = [each.cpu_times() for each in family(pid)]
    return sum(each.user + each.system for each in times)


def compared(without: Sequence[Step], with_it: Sequence[Step]) -> dict[str, Any]:
    """Both times, each with the median and the range of their ratios."""
    told: dict[str, Any] = {}
    for name in ("milliseconds", "cpu"):
        each = {"without": [getattr(step, name) for step in without], "with": [getattr(step, name) for step in with_it]}
        ratios = [one / other for one, other in zip(each["with"], each["without"], strict=True)]
        told[name] = {**each, "ratio": statistics.median(ratios), "range": [min(ratios), max(ratios)]}
    return told
