"""Question: do codecs and exchange algorithms compute the same on a GPU as on the CPU, and how fast are the codecs?

    python3 -m benchmarks.gpu.exchange [--device cuda] [--checks] [--mebibytes 256] [--rounds 5]

Checks first: every codec gives the CPU's bytes and values; every algorithm trains two ranks, threads that share the
GPU, as on the CPU; with two GPUs or more also over NCCL, a process each. Then each codec over one large tensor. Writes
results/gpu_exchange.json. `--device cpu --mebibytes 4` runs the same road without a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.records import Record, check, hardware, options, run, synchronise, worst
from shoal import Engine, Plan
from shoal.comm import World
from shoal.comm.codecs import Codec, codec
from shoal.comm.simulation import simulate_world
from shoal.exchange.named import ALGORITHMS
from shoal.launch import join, launch
from shoal.models import regression

CODECS = ("fp16", "bf16", "u8", "u4", "sign", "topk")
RANKS, STEPS, WIDTH = 2, 12, 96
OPTIONS: dict[str, dict[str, Any]] = {
    "qadam": {"warmup": 4},
    "onebit_adam": {"warmup": 4},
    "local_sgd": {"every": 4},
    "post_local_sgd": {"start": 4, "every": 4},
    "diloco": {"every": 4},
    "streaming_diloco": {"every": 8, "overlap": 1},
    "islands": {"ranks": 1, "across": {"name": "local_sgd", "every": 4}},
    # its rounds begin when a clock says so: only the exact steps repeat
    "async_average": {"interval_ms": 0.0, "warmup": STEPS},
}


def rows() -> list[dict[str, Tensor]]:
    """Random inputs and targets, the same on every machine."""
    draw = torch.Generator().manual_seed(7)
    return [
        {"inputs": torch.randn(WIDTH, generator=draw), "targets": torch.randn(WIDTH, generator=draw)} for _ in range(96)
    ]


def network() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def losses(world: World, name: str) -> list[float]:
    """Of a few steps with accumulation and clipping."""
    exchange = {"name": name, **OPTIONS.get(name, {})}
    engine = Engine(
        network,
        regression,
        partial(torch.optim.AdamW, lr=1e-3),
        Plan(dp=world.size, exchange=exchange),
        global_batch=16,
        microbatch=4,
        clip=1.0,
        dropout="fused",
        world=world,
    )
    try:
        return [engine.step(batch).loss for batch in engine.batches(rows(), steps=STEPS)]
    finally:
        engine.close()


def check_codec(name: str, device: str) -> dict[str, Any]:
    """Bytes and decoded values that differ from the CPU's, odd sizes among them."""
    chosen, different = codec(name), 0
    for numel in (1, 7, 1024, 100_003):
        flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        here, there = encoded(chosen, flat), encoded(chosen, flat.to(device))
        back, also = torch.empty(numel), torch.empty(numel, device=device)
        chosen.decode(here, back)
        chosen.decode(there, also)
        different += int((here != there.cpu()).sum()) + int((back != also.cpu()).sum())
    return check(f"codec {name}: bytes and values that differ from the CPU", different, 0)


def encoded(chosen: Codec, flat: Tensor) -> Tensor:
    data = torch.zeros(chosen.encoded_bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
    chosen.encode(flat, data)
    return data


def check_algorithm(name: str, device: str) -> dict[str, Any]:
    """Two ranks on the device against two on the CPU. Lossy ones may round another way where a value lies between two
    codes."""
    ours = simulate_world(RANKS, losses, name, device=device)[0]
    reference = simulate_world(RANKS, losses, name)[0]
    return check(f"{name}: largest relative difference of {STEPS} losses from the CPU", worst(ours, reference), 1e-2)


def check_nccl() -> list[dict[str, Any]]:
    """Every algorithm over NCCL, a process and a GPU each, against threads on the CPU."""
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory) / "losses.pt"
        code = launch(["-m", "benchmarks.gpu.exchange", "--rank", str(results)], RANKS, run_dir=Path(directory))
        if code:
            return [check("ranks over NCCL: exit code", code, 0)]
        ours = torch.load(results)
    return [
        check(
            f"{name} over NCCL: difference from the CPU",
            worst(ours[name], simulate_world(RANKS, losses, name)[0]),
            1e-2,
        )
        for name in ALGORITHMS
    ]


def be_a_rank(results: Path) -> None:
    """What each process of `check_nccl` runs."""
    world = join()
    seen = {name: losses(world, name) for name in ALGORITHMS}
    if world.rank == 0:
        torch.save(seen, results)


def time_codec(name: str, device: str, mebibytes: int, rounds: int) -> dict[str, Any]:
    """GB/s of fp32 in and out, the median of the rounds after one that warms up."""
    chosen, flat = codec(name), torch.randn(mebibytes * 2**18, device=device)
    data, back = encoded(chosen, flat), torch.empty_like(flat)
    seconds: dict[str, list[float]] = {"encode": [], "decode": []}
    for number in range(rounds + 1):
        for kind, call in (
            ("encode", partial(chosen.encode, flat, data)),
            ("decode", partial(chosen.decode, data, back)),
        ):
            synchronise(device)
            started = time.perf_counter()
            call()
            synchronise(device)
            if number:
                seconds[kind].append(time.perf_counter() - started)
    return {"codec": name, **{kind: flat.nbytes / statistics.median(times) / 1e9 for kind, times in seconds.items()}}


def checks(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    yield from (check_codec(name, arguments.device) for name in CODECS)
    torch.linalg.qr(
        torch.eye(2, device=arguments.device)
    )  # torch loads what it needs for it once, and not by two threads
    yield from (check_algorithm(name, arguments.device) for name in ALGORITHMS)
    if torch.cuda.device_count() >= RANKS:
        yield from check_nccl()
    else:
        print("NCCL needs a GPU a rank: not checked", flush=True)


def times(arguments: argparse.Namespace, record: Record) -> None:
    device = arguments.device
    table = [time_codec(name, device, arguments.mebibytes, arguments.rounds) for name in CODECS]
    print(f"\n{hardware(device)}, {arguments.mebibytes} MiB of fp32, GB/s of it")
    for row in table:
        print(f"{row['codec']:8s} encode {row['encode']:8.1f}   decode {row['decode']:8.1f}")
    record.keep(table=table)


def main() -> None:
    parser = options("exchange")
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        be_a_rank(arguments.rank)
        return
    run("gpu_exchange", arguments, checks, times)


if __name__ == "__main__":
    main()
