"""Question: does the engine compute the same on a GPU as on the CPU, and what does it cost beside a plain torch loop?

    python3 -m benchmarks.gpu.engine [--device cuda] [--checks] [--preset 350m] [--batch 16] [--rounds 5] [--steps 10]

Checks first, each with the figure it saw: keyed dropout draws the same mask, twenty steps in fp64 and fp32 follow the
CPU, a loss that is not finite leaves the weights alone, a checkpoint saved here continues on the CPU, experts choose
and drop the same and their grouped product is that of one by one. Then, in turn, round by round: a plain loop in bf16
with fp32 masters (the same kernels and optimizer), the engine, and both with compiled blocks. Writes
results/gpu_engine.json. `--device cpu --preset 1m` runs the same road without a GPU.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.records import Record, check, hardware, options, run, synchronise, worst
from benchmarks.gpu.rows import rows, stacked
from shoal import Engine, Plan, TrainingError, lr
from shoal.comm import World
from shoal.models import GPT, PRESETS, GPTConfig, MoEConfig, causal_lm, flops_per_token
from shoal.models.experts import by_expert
from shoal.module.compiling import compile_blocks
from shoal.module.random import keyed_dropout_mask

SMALL = GPTConfig(vocab_size=61, sequence=12, layers=2, d_model=32, heads=4, dropout=0.1)
ADAMW = partial(torch.optim.AdamW, lr=3e-3)


SMALL_MOE = replace(SMALL, moe=MoEConfig(4, shared=1, capacity_factor=1.25, balance_rate=0.01, d_ff=24))


def small_engine(device: str, precision: str, config: GPTConfig = SMALL) -> Engine:
    return Engine(
        lambda: GPT(config),
        causal_lm,
        ADAMW,
        global_batch=12,
        microbatch=5,
        precision=precision,
        clip=0.8,
        schedule=lr.cosine(20, 3),
        world=World.single(device),
    )


def losses(engine: Engine, steps: int) -> list[float]:
    return [engine.step(batch).loss for batch in engine.batches(rows(61, 12, 41), steps=steps)]


def check_mask(device: str) -> dict[str, Any]:
    """The same elements are kept on both devices."""
    keys = torch.arange(5) * 0x9E3779B97F4A7C1
    ours, reference = keyed_dropout_mask(keys.to(device), 1001, 0.3).cpu(), keyed_dropout_mask(keys, 1001, 0.3)
    return check("keyed dropout: elements that differ from the CPU", int((ours != reference).sum()), 0)


def check_parity(device: str, precision: str, allowed: float) -> dict[str, Any]:
    """Twenty steps with dropout, accumulation, clipping, an uneven batch."""
    ours, reference = losses(small_engine(device, precision), 20), losses(small_engine("cpu", precision), 20)
    return check(f"{precision}: largest relative difference of 20 losses from the CPU", worst(ours, reference), allowed)


def check_not_finite(device: str) -> dict[str, Any]:
    """The step after the bad one raises; no weight has moved."""
    engine = small_engine(device, "bf16")
    batches = engine.batches(rows(61, 12, 41))
    engine.step(next(batches))
    weights = {name: value.detach().clone() for name, value in engine.optimizer.parameters.items()}
    hook = engine.module.register_forward_hook(lambda module, args, output: output * math.nan)
    raised = False
    try:
        engine.step(next(batches))
        hook.remove()
        engine.step(next(batches))
    except TrainingError:
        raised = True
    moved = sum(not torch.equal(weights[name], value) for name, value in engine.optimizer.parameters.items())
    return check("a loss that is not finite: weights moved (or not raised)", moved + (not raised) * 1000, 0)


def check_resume(device: str) -> dict[str, Any]:
    """Saved on the device after ten steps, continued on the CPU."""
    with tempfile.TemporaryDirectory() as directory:
        first = small_engine(device, "fp64")
        losses(first, 10)
        first.save(directory)
        rest = losses(first, 10)
        second = small_engine("cpu", "fp64")
        second.load(directory)
        seen = worst(losses(second, 10), rest)
    return check("continued on the CPU: largest relative difference of 10 losses", seen, 1e-9)


def check_experts(device: str) -> list[dict[str, Any]]:
    """Twenty steps with capacity and a bias that balances; the product of stacked matrices in bf16."""
    runs = []
    for where in (device, "cpu"):
        engine = small_engine(where, "fp64", SMALL_MOE)
        results = [engine.step(batch) for batch in engine.batches(rows(61, 12, 41), steps=20)]
        runs.append([(result.loss, result.tokens_per_expert, result.dropped) for result in results])
    apart = worst(*([loss for loss, *_ in run] for run in runs))
    routed = sum(ours[1:] != theirs[1:] for ours, theirs in zip(*runs, strict=True))
    draw, counts = torch.Generator().manual_seed(0), [100, 0, 28, 72]
    tokens, weights = (torch.randn(*shape, generator=draw).bfloat16() for shape in ((200, 64), (4, 128, 64)))
    expected = torch.cat(
        [part.float() @ weight.float().T for part, weight in zip(tokens.split(counts), weights, strict=True)]
    )
    found = by_expert(tokens.to(device), weights.to(device), counts).float().cpu()
    off = float((found - expected).abs().max() / expected.abs().max())
    return [
        check("experts: largest relative difference of 20 losses from the CPU", apart, 1e-9),
        check("experts: steps in which tokens went elsewhere", routed, 0),
        check("experts: grouped product in bf16, largest difference of the largest", off, 1e-2),
    ]


def checks(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = arguments.device
    yield check_mask(device)
    yield check_parity(device, "fp64", 1e-9)
    yield check_parity(device, "fp32", 1e-4)
    yield check_not_finite(device)
    yield check_resume(device)
    yield from check_experts(device)


def engine_step(config: GPTConfig, batch: int, device: str, compiled: bool) -> Callable[[], Any]:
    engine = Engine(
        lambda: GPT(config),
        causal_lm,
        ADAMW,
        Plan(compile=compiled),
        global_batch=batch,
        microbatch=batch,
        precision="bf16",
        world=World.single(device),
    )
    batches = engine.batches(rows(config.vocab_size, config.sequence, batch * 4))
    return lambda: engine.step(next(batches))


def plain_step(config: GPTConfig, batch: int, device: str, compiled: bool) -> Callable[[], Any]:
    """bf16 weights, fp32 masters, fused AdamW, the norm of the gradient: what the engine does, by hand."""
    model = GPT(config).to(device, torch.bfloat16)
    if compiled:
        compile_blocks(model, True)
    weights: list[torch.Tensor] = list(model.parameters())
    masters: list[torch.Tensor] = [torch.nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=3e-3, fused=True)
    data = stacked(config, batch, pinned=device != "cpu")

    def step() -> None:
        total, count = causal_lm(model, {key: value.to(device, non_blocking=True) for key, value in data.items()})[:2]
        (total / count).backward()
        for weight, master in zip(weights, masters, strict=True):
            master.grad, weight.grad = weight.grad.float(), None  # type: ignore[union-attr]
        torch.nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None])
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)

    return step


def measure(contenders: dict[str, Callable[[], Any]], device: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds a step, one figure a round, contenders in turn."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, step in contenders.items():
            synchronise(device)
            started = time.perf_counter()
            for _ in range(steps):
                step()
            synchronise(device)
            if number:  # the first round warms up and compiles
                samples[name].append((time.perf_counter() - started) / steps * 1e3)
    return samples


def times(arguments: argparse.Namespace, record: Record) -> None:
    device = arguments.device
    config = PRESETS[arguments.preset]
    kinds = [False] if arguments.no_compile else [False, True]
    contenders = {
        f"{name}{', compiled' if compiled else ''}": make(config, arguments.batch, device, compiled)
        for compiled in kinds
        for name, make in (("plain loop", plain_step), ("shoal", engine_step))
    }
    samples = measure(contenders, device, arguments.rounds, arguments.steps)
    tokens = arguments.batch * config.sequence
    table = []
    for name, times in samples.items():
        against = samples[name.replace("shoal", "plain loop")]
        row = {
            "contender": name,
            "ms": statistics.median(times),
            "min": min(times),
            "max": max(times),
            "tokens_per_second": tokens / statistics.median(times) * 1e3,
            "tflops": flops_per_token(config, config.sequence) * tokens / statistics.median(times) / 1e9,
            "ratio_to_plain": statistics.median(a / b for a, b in zip(times, against, strict=True)),
        }
        table.append(row)
    print(
        f"\n{hardware(device)}, {arguments.preset}, bf16, {arguments.batch} x {config.sequence} tokens, "
        f"{arguments.rounds} rounds of {arguments.steps} steps"
    )
    for row in table:
        print(
            f"{row['contender']:24s} {row['ms']:9.2f} ms/step ({row['min']:.2f}..{row['max']:.2f}) "
            f"{row['tokens_per_second']:11.0f} tokens/s {row['tflops']:7.1f} TFLOP/s  x{row['ratio_to_plain']:.3f}"
        )
    record.keep(samples=samples, table=table)


def main() -> None:
    parser = options("engine")
    parser.add_argument("--preset", default="350m", choices=list(PRESETS))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled rows")
    run("gpu_engine", parser.parse_args(), checks, times)


if __name__ == "__main__":
    main()
