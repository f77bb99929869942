"""What the machine can do: the link between host and device, the host's memory, AdamW on the host, the disk. GB/s are
1e9 bytes a second."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.records import synchronise
from shoal.optim.fused.host_adam import adam_update
from shoal.optim.tiers.disk import Disk, buffer, wait


def median_seconds(call: Callable[[], object], device: str, rounds: int) -> float:
    """Of the rounds after one that warms up."""
    seconds = []
    for _ in range(rounds + 1):
        synchronise(device)
        began = time.perf_counter()
        call()
        synchronise(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def link(device: str, mebibytes: int, rounds: int) -> dict[str, float]:
    """GB/s of pinned copies to the device, from it, and both ways at once (the sum)."""
    on_gpu = device.startswith("cuda")
    there, back = (torch.empty(mebibytes << 20, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2))
    into, out = (torch.empty(mebibytes << 20, dtype=torch.uint8, device=device) for _ in range(2))

    def both() -> None:
        if not on_gpu:
            into.copy_(there)
            back.copy_(out)
            return
        for stream, to, source in ((torch.cuda.Stream(), into, there), (torch.cuda.Stream(), back, out)):
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)

    calls = {
        "to the device": lambda: into.copy_(there, non_blocking=True),
        "from the device": lambda: back.copy_(out, non_blocking=True),
        "both ways": both,
    }
    nbytes = {"both ways": 2 * there.nbytes}
    return {
        f"{name}, GB/s": nbytes.get(name, there.nbytes) / median_seconds(call, device, rounds) / 1e9
        for name, call in calls.items()
    }


def host_memory(mebibytes: int, rounds: int) -> dict[str, float]:
    """GB/s of a = b + c over large arrays, all cores: two read, one written (STREAM's add)."""
    a, b, c = (torch.ones(mebibytes << 18) for _ in range(3))
    seconds = median_seconds(lambda: torch.add(b, c, out=a), "cpu", rounds)
    return {"host memory, GB/s": 3 * a.nbytes / seconds / 1e9}


def host_adam(elements: int, rounds: int) -> dict[str, float]:
    """Nanoseconds a parameter: bf16 gradients in, bf16 weights out, fp32 masters."""
    master, m, v = (torch.zeros(elements) for _ in range(3))
    gradient, weights = (torch.ones(elements, dtype=torch.bfloat16) for _ in range(2))

    def update() -> None:
        adam_update(
            master, gradient, m, v, 1, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decoupled=True,
            grad_factor=0.5, weights=weights,
        )  # fmt: skip

    return {"AdamW on the host, ns/parameter": median_seconds(update, "cpu", rounds) / elements * 1e9}


def disk(mebibytes: int, rounds: int, directory: Path | None = None) -> dict[str, float]:
    """GB/s past the kernel's cache, as `plan.memory.disk` reads and writes."""
    with tempfile.TemporaryDirectory(dir=directory) as path:
        here = Disk(Path(path))
        try:
            file, memory = here.files({"rates": mebibytes << 20})["rates"], buffer(mebibytes << 20)
            written = median_seconds(lambda: wait(file.write(memory)), "cpu", rounds)
            read = median_seconds(lambda: wait(file.read(memory)), "cpu", rounds)
        finally:
            here.close()
    return {"disk reads, GB/s": memory.nbytes / read / 1e9, "disk writes, GB/s": memory.nbytes / written / 1e9}


def all_rates(device: str, mebibytes: int, rounds: int, directory: Path | None = None) -> dict[str, float]:
    return {
        **link(device, mebibytes, rounds),
        **host_memory(mebibytes, rounds),
        **host_adam(mebibytes << 17, rounds),
        **disk(mebibytes, rounds, directory),
    }
