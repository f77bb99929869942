"""Question: do stages compute the same on GPUs as on the CPU, and what does a step of each schedule take beside
torch.distributed.pipelining?

    python3 -m benchmarks.gpu.pipeline [--device cuda] [--checks] [--preset 350m] [--microbatches 8] [--rows 2]
    [--rounds 5] [--steps 5]

Checks first: each schedule with a flush trains two ranks, threads that share the GPU, as one process on the CPU does,
with recompute, weights that pass and activations on the host among them. With two GPUs or more all of them (those
without a flush: as two ranks on the CPU do) over NCCL, a process each; there steps are then timed in turn, in bf16 with
fp32 masters (Shoal) and in bf16 alone (torch, whose pipelining has no masters: less work). Writes
results/gpu_pipeline.json. `--device cpu --preset 1m` runs the same road without a GPU, the processes over gloo or
shared memory.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.records import Record, check, hardware, options, run, worst
from benchmarks.gpu.rows import rows, stacked
from benchmarks.torch_stages import torch_stages
from shoal import Engine, Plan
from shoal.comm import World
from shoal.comm.simulation import simulate_world
from shoal.device import finish
from shoal.launch import join, launch
from shoal.models import GPT, PRESETS, GPTConfig, causal_lm
from shoal.pipeline import schedule_of

RANKS, STEPS = 2, 8
SMALL = GPTConfig(vocab_size=61, sequence=12, layers=5, d_model=32, heads=4, dropout=0.1, tied=False)
PLANS: dict[str, dict[str, Any]] = {
    **{name: {"schedule": name} for name in ("gpipe", "1f1b", "interleaved", "zb1p", "zbv")},
    "recompute": {"schedule": "zb1p", "recompute": "full"},
    "weights and activations on the host": {"schedule": "1f1b", "memory": {"activations": 1.0}},
}
UNFLUSHED: dict[str, dict[str, Any]] = {"2bw": {"schedule": "2bw"}, "pipedream": {"schedule": "pipedream"}}
TIMED = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
    "2bw": "",
}
"""By Shoal's name torch's class, where it has one."""
ADAMW = partial(torch.optim.AdamW, lr=3e-3)


def losses(world: World, options: dict[str, Any], stages: int) -> list[float]:
    """Of a few steps in fp64 with dropout and clipping; of an uneven batch where steps may have more than one
    microbatch."""
    one = options.get("schedule") == "pipedream"
    engine = Engine(
        lambda: GPT(SMALL),
        causal_lm,
        ADAMW,
        Plan(pp=stages, **options) if stages > 1 else Plan(),
        global_batch=5 if one else 14,
        microbatch=5,
        precision="fp64",
        clip=0.8,
        world=world,
    )
    try:
        return [engine.step(batch).loss for batch in engine.batches(rows(61, 12, 41), steps=STEPS)]
    finally:
        engine.close()


def reference(name: str) -> list[float]:
    """What the losses are held against."""
    if name in UNFLUSHED:
        return simulate_world(RANKS, losses, UNFLUSHED[name], RANKS)[0]
    return losses(World.single("cpu"), {}, 1)


def check_plan(name: str, device: str) -> dict[str, Any]:
    """Two threads as ranks."""
    ours = simulate_world(RANKS, losses, {**PLANS, **UNFLUSHED}[name], RANKS, device=device)[0]
    return check(f"{name}: largest relative difference of {STEPS} losses", worst(ours, reference(name)), 1e-9)


def apart(what: list[str]) -> Any:
    """What rank 0 of two processes of this script has saved, called with `what`; UserError's exit code where they
    fail."""
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory) / "results.pt"
        code = launch(["-m", "benchmarks.gpu.pipeline", "--into", str(results), *what], RANKS, run_dir=Path(directory))
        return torch.load(results) if code == 0 else code


def check_processes() -> list[dict[str, Any]]:
    """Every plan with a process, and where there are any a GPU, for each rank."""
    ours = apart(["--rank", "check"])
    if isinstance(ours, int):
        return [check("ranks that are processes: exit code", ours, 0)]
    return [
        check(f"{name}, processes: difference", worst(found, reference(name)), 1e-9) for name, found in ours.items()
    ]


def numbers(schedule: str, layers: int) -> list[int]:
    """Blocks of each stage, the same on both sides: as even as they come out, more in front."""
    stages = schedule_of(Plan(pp=RANKS, schedule=schedule), 1).stages
    return [layers // stages + (place < layers % stages) for place in range(stages)]


def shoal_step(
    schedule: str, config: GPTConfig, microbatches: int, each: int, world: World
) -> tuple[Engine, Callable[[], Any]]:
    engine = Engine(
        lambda: GPT(config),
        causal_lm,
        partial(torch.optim.AdamW, lr=3e-4, fused=True),
        Plan(pp=RANKS, schedule=schedule, stages=numbers(schedule, config.layers)),
        global_batch=microbatches * each,
        microbatch=each,
        precision="bf16",
        world=world,
    )
    batches = engine.batches(rows(config.vocab_size, config.sequence, microbatches * each * 2))
    return engine, lambda: engine.step(next(batches))


def torch_step(schedule: str, config: GPTConfig, microbatches: int, each: int, device: str) -> Callable[[], Any]:
    from torch.distributed import pipelining

    rank, ours = dist.get_rank(), schedule_of(Plan(pp=RANKS, schedule=schedule), microbatches)
    stages = torch_stages(
        GPT(config), numbers(schedule, config.layers), ours, rank, torch.device(device), torch.bfloat16
    )
    kind: Any = getattr(pipelining, TIMED[schedule])

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    run = kind(stages[0] if len(stages) == 1 else stages, microbatches, loss_fn=loss)
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.submod.parameters()], lr=3e-4, fused=True)
    data = {key: value.to(device) for key, value in stacked(config, microbatches * each).items()}
    has_first, has_last = 0 in ours.stages_of(rank), ours.stages - 1 in ours.stages_of(rank)

    def step() -> None:
        arguments = (data["input_ids"],) if has_first else ()
        run.step(*arguments, **({"target": data["labels"], "losses": []} if has_last else {}))
        optimizer.step()
        optimizer.zero_grad()

    return step


def time_all(world: World, arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """By schedule and side, milliseconds a step, one figure a round, in turn."""
    config, device = replace(PRESETS[arguments.preset], tied=False), str(world.device)
    if not dist.is_initialized():  # of our own, beside what Shoal's ranks have
        store = dist.FileStore(f"{arguments.into}.store", world.size)
        dist.init_process_group(
            "nccl" if device.startswith("cuda") else "gloo", store=store, rank=world.rank, world_size=world.size
        )
    found: dict[str, dict[str, list[float]]] = {}
    for schedule, theirs in TIMED.items():
        given = (schedule, config, arguments.microbatches, arguments.rows)
        engine, ours = shoal_step(*given, world)
        contenders = {"shoal": ours}
        if theirs:
            contenders["torch"] = torch_step(*given, device)
        found[schedule] = {name: [] for name in contenders}
        for number, (name, step) in itertools.product(range(arguments.rounds + 1), contenders.items()):
            world.everyone.barrier()
            started = time.perf_counter()
            for _ in range(arguments.steps):
                step()
            finish(world.device)  # without a flush other streams than this one wait for the next step
            world.everyone.barrier()
            if number:  # the first round warms up
                found[schedule][name].append((time.perf_counter() - started) / arguments.steps * 1e3)
        engine.close()
    return found


def be_a_rank(arguments: argparse.Namespace) -> None:
    """What the processes of `apart` run."""
    world = join()
    if arguments.rank == "check":
        seen: Any = {name: losses(world, options, RANKS) for name, options in {**PLANS, **UNFLUSHED}.items()}
    else:
        seen = time_all(world, arguments)
    if world.rank == 0:
        torch.save(seen, arguments.into)


def has_processes(device: str) -> bool:
    """Whether ranks can be processes here; says so where they cannot."""
    if device.startswith("cuda") and torch.cuda.device_count() < RANKS:
        print("processes need a GPU each: neither checked nor timed", flush=True)
        return False
    return True


def checks(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    # Without a flush stages are steps apart: threads that give a GPU its work would wait for each other.
    shared = (*PLANS, *UNFLUSHED) if arguments.device == "cpu" else PLANS
    yield from (check_plan(name, arguments.device) for name in shared)
    if has_processes(arguments.device):
        yield from check_processes()


def times(arguments: argparse.Namespace, record: Record) -> None:
    if not has_processes(arguments.device):
        return
    given = [f"--{name}={getattr(arguments, name)}" for name in ("preset", "microbatches", "rows", "rounds", "steps")]
    seen = apart(["--rank", "time", *given])
    record.check([check("processes that are timed: exit code", seen if isinstance(seen, int) else 0, 0)])
    if isinstance(seen, int):
        return
    record.keep(times=seen)
    print(
        f"\n{hardware(arguments.device)}, {arguments.preset}, {arguments.microbatches} microbatches of "
        f"{arguments.rows} rows, {RANKS} ranks, ms a step"
    )
    for schedule, sides in seen.items():
        shown = "   ".join(
            f"{name} {statistics.median(each):9.2f} ({min(each):.2f}..{max(each):.2f})" for name, each in sides.items()
        )
        print(f"{schedule:12s} {shown}")


def main() -> None:
    parser = options("pipeline")
    parser.add_argument("--preset", default="350m", choices=list(PRESETS))
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2, help="of a microbatch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rank", choices=["check", "time"], help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        be_a_rank(arguments)
        return
    run("gpu_pipeline", arguments, checks, times)


if __name__ == "__main__":
    main()
