"""What each of the doctor's two ranks runs: python -m shoal.cli.two_ranks RESULT. Rank 0 writes the time of an all-reduce there."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from shoal.launch import join

ROUNDS = 5


def main(result: Path) -> None:
    """Sums a mebibyte of ones; AssertionError where the sum is wrong."""
    world = join(timeout=60.0)
    ones = torch.ones(2**18, device=world.device)
    seconds = []
    for _ in range(ROUNDS):
        ones.fill_(1.0)
        world.everyone.barrier()
        began = time.perf_counter()
        total = float(world.everyone.all_reduce(ones)[0])
        seconds.append(time.perf_counter() - began)
        assert total == world.size, f"{world.size} ones sum to {total}"
    if world.rank == 0:
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        result.write_text(json.dumps({"seconds": min(seconds), "backend": backend}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
