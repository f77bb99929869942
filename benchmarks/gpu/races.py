"""Question: is work on several streams ordered, whatever the streams' speed?

    python3 -m benchmarks.gpu.races [--device cuda] [--seeds 3] [--steps 6] [--only "zero 3,1f1b"]

Plans whose work runs on side streams (weights, state and activations that move, deferred updates, gradients exchanged
beside the backward pass) are trained three ways: with the host waiting after each operation, which nothing can race;
with streams kept busy for random times before their work; and under torch's sanitizer for CUDA streams, which reports
unordered accesses. Losses and norms of gradients of the second must be those of the first to the bit, but for what two
runs of the first differ by. Writes results/gpu_races.json. `--device cpu` runs the same road without a GPU, where
nothing is delayed and there is no sanitizer.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.records import Record, check, options, synchronise, worst
from benchmarks.gpu.rows import rows
from shoal import Engine, Plan
from shoal.comm import World
from shoal.comm.simulation import simulate_world
from shoal.models import GPT, GPTConfig, causal_lm

SMALL = GPTConfig(vocab_size=61, sequence=32, layers=4, d_model=64, heads=4, dropout=0.1)
# Each says how it updates: left to itself an engine measures what is faster, and the last bits depend on that.
PLANS: dict[str, dict[str, Any]] = {
    "updates at once": {"memory": {"update": "at once"}},
    "deferred updates": {"memory": {"update": "deferred"}},
    "streamed updates": {"memory": {"update": "streamed"}},
    "activations on the host": {"memory": {"update": "at once", "activations": 1.0}},
    "recompute": {"memory": {"update": "deferred"}, "recompute": "full"},
    "dp": {"dp": 2},
    "topk": {"dp": 2, "exchange": {"name": "topk", "ratio": 0.1}},
    "zero 2": {"dp": 2, "zero": 2},
    "zero 3": {"dp": 2, "zero": 3},
    "zero 3 on the host": {"dp": 2, "zero": 3, "memory": {"update": "deferred"}},
    "1f1b": {"pp": 2},
}
BUSY_CYCLES = 4_000_000
"""About two milliseconds, the longest delay."""
RATE = 0.1
"""Part of the operations before which their stream is kept busy; every stream that is entered is."""

Seen = list[float]


class Waiting(TorchDispatchMode):
    """Waits, on the host, after each operation."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        synchronise(self._device)
        return result


class Delaying(TorchDispatchMode):
    """Keeps the current stream busy for a random time before some of the operations."""

    def __init__(self, device: str, draw: random.Random) -> None:
        super().__init__()
        self._device, self._draw = device, draw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._draw.random() < RATE:
            keep_busy(self._device, self._draw)
        return func(*args, **(kwargs or {}))


def keep_busy(device: str, draw: random.Random) -> None:
    if device.startswith("cuda"):
        torch.cuda._sleep(draw.randrange(BUSY_CYCLES))


@contextmanager
def streams_delayed(device: str, draw: random.Random) -> Iterator[None]:
    """Keeps each stream busy for a random time when a thread begins to work on it, in all threads."""
    enter, one_at_a_time = torch.cuda.StreamContext.__enter__, threading.Lock()

    def entered(self: Any) -> None:
        enter(self)
        with one_at_a_time:
            keep_busy(device, draw)

    with mock.patch.object(torch.cuda.StreamContext, "__enter__", entered):
        yield


def train(world: World, plan: dict[str, Any], steps: int, mode: AbstractContextManager[Any]) -> Seen:
    """Losses and norms of the gradient of a few steps with accumulation and clipping: a weight that came late changes
    them all."""
    data = rows(SMALL.vocab_size, SMALL.sequence, 8 * steps)
    engine = Engine(
        partial(GPT, SMALL),
        causal_lm,
        partial(torch.optim.AdamW, lr=3e-3),
        Plan(**plan),
        global_batch=8,
        microbatch=2,
        precision="bf16",
        clip=0.8,
        world=world,
    )
    try:
        with mode:
            results = [engine.step(batch) for batch in engine.batches(data, steps=steps)]
        return [figure for result in results for figure in (result.loss, result.grad_norm)]
    finally:
        engine.close()


def trained(name: str, device: str, steps: int, mode: Any) -> Seen:
    """What the ranks of a plan see, one after the other; `mode()` is entered in each rank."""
    plan = PLANS[name]
    ranks = plan.get("dp", 1) * plan.get("pp", 1)
    if ranks == 1:
        return train(World.single(device), plan, steps, mode())
    seen = simulate_world(ranks, lambda world: train(world, plan, steps, mode()), device=device)
    return [figure for each in seen for figure in each]


def check_delays(name: str, device: str, seeds: int, steps: int) -> dict[str, Any]:
    waited = trained(name, device, steps, partial(Waiting, device))
    noise = worst(trained(name, device, steps, partial(Waiting, device)), waited)
    if not math.isfinite(noise):
        return check(f"{name}: a run that waits has figures that are not finite", 1, 0)
    seen = 0.0
    for seed in range(seeds):
        draw = random.Random(seed)
        with streams_delayed(device, draw):
            seen = max(seen, worst(trained(name, device, steps, partial(Delaying, device, draw)), waited))
    return check(f"{name}: largest relative difference of a run under random delays from one that waits", seen, noise)


def check_sanitizer(name: str, device: str, steps: int) -> dict[str, Any]:
    """The plan in a process of its own: the sanitizer has to be there before the first operation."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.races", "--rank", name, "--device", device, "--steps", str(steps)],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        capture_output=True,
        text=True,
    )
    reports = done.stderr.count("CSAN detected a possible data race")
    if reports or done.returncode:
        print(done.stderr[-4000:], flush=True)
    return check(f"{name}: reports of the sanitizer of streams, or its exit code", reports or abs(done.returncode), 0)


def run(arguments: argparse.Namespace, record: Record) -> None:
    for name in arguments.only.split(","):
        record.check([check_delays(name, arguments.device, arguments.seeds, arguments.steps)])
        if arguments.device.startswith("cuda") and torch.backends.cuda.is_built():  # whose calls the sanitizer sees
            record.check([check_sanitizer(name, arguments.device, arguments.steps)])


def main() -> None:
    parser = options("races")
    parser.add_argument("--seeds", type=int, default=3, help="runs with random delays")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", default=",".join(PLANS), help="plans, in this order")
    parser.add_argument("--rank", choices=list(PLANS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        trained(arguments.rank, arguments.device, arguments.steps, nullcontext)
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    with Record("gpu_races", arguments) as record:
        run(arguments, record)


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    main()
