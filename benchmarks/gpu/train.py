"""Question: what does plain training reach on one GPU, in tokens a second and as a part of what its matrix products
reach?

    python3 -m benchmarks.gpu.train [--device cuda] [--checks] [--preset 124m,1.3b] [--tokens 16384] [--rounds 3]
    [--steps 5] [--no-compile]

Checks first: compiled blocks and every policy of recompute follow the losses of plain training. Then, of each model in
bf16 with fp32 masters, in turn, round by
round: a plain loop (the same kernels and optimizer), Shoal, torch FSDP2; then pairs of plain loop and Shoal, compiled,
    and Shoal with recompute. Utilisation: the
model's FLOPs (recomputation not counted) over what a large bf16 product reaches here. Writes results/gpu_train.json.
`--device cpu --preset 1m --tokens 256` runs the same road without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.engine import measure, plain_step
from benchmarks.gpu.peers import LR, fsdp2_step
from benchmarks.gpu.records import Record, check, hardware, options, run, worst
from benchmarks.gpu.rows import rows
from shoal import Engine, Plan
from shoal.comm import World
from shoal.device import forget_most_allocated, measure_peak_flops
from shoal.models import GPT, PRESETS, GPTConfig, causal_lm, flops_per_token

SMALL = GPTConfig(61, 64, 4, 64, 4)
RECOMPUTE: dict[str, Any] = {
    "full": "full",
    "selective": {"name": "selective", "save": ["matmul", "attention"]},
    "every second": {"name": "blocks", "every": 2},
}
Contender = Callable[[], Callable[[], Any]]


def engine(config: GPTConfig, batch: int, device: str, **plan: Any) -> Engine:
    return Engine(
        partial(GPT, config),
        causal_lm,
        partial(torch.optim.AdamW, lr=LR),
        Plan(**plan),
        global_batch=batch,
        microbatch=batch,
        precision="bf16",
        world=World.single(device),
    )


def shoal_step(config: GPTConfig, batch: int, device: str, **plan: Any) -> Callable[[], Any]:
    running = engine(config, batch, device, **plan)
    batches = running.batches(rows(config.vocab_size, config.sequence, batch * 4))
    return lambda: running.step(next(batches))


def losses(device: str, **plan: Any) -> list[float]:
    running = engine(SMALL, 4, device, **plan)
    try:
        data = rows(SMALL.vocab_size, SMALL.sequence, 32)
        return [running.step(batch).loss for batch in running.batches(data, steps=8)]
    finally:
        running.close()


def check_losses(device: str, what: str, allowed: float, **plan: Any) -> dict[str, Any]:
    """Eight steps in bf16."""
    seen = worst(losses(device, **plan), losses(device))
    return check(f"{what}: largest relative difference of 8 losses from plain training", seen, allowed)


def groups(config: GPTConfig, batch: int, device: str, compiled: bool) -> list[dict[str, Contender]]:
    """Those who take turns; a group at a time is in memory. The first of each is the plain loop of its kind."""
    plain, ours = partial(plain_step, config, batch, device), partial(shoal_step, config, batch, device)
    found: list[dict[str, Contender]] = [
        {
            "plain loop": partial(plain, False),
            "shoal": ours,
            "fsdp2": partial(fsdp2_step, config, batch, device, offload=False),
        }
    ]
    if compiled:
        found.append({"plain loop, compiled": partial(plain, True), "shoal, compiled": partial(ours, compile=True)})
    policies = {f"shoal, recompute {name}": partial(ours, recompute=policy) for name, policy in RECOMPUTE.items()}
    return [*found, {"plain loop, again": partial(plain, False), **policies}]


def measure_groups(
    config: GPTConfig, batch: int, device: str, rounds: int, steps: int, compiled: bool, peak: float
) -> Iterator[dict[str, Any]]:
    """A row a contender, as its group is done; `ratio_to_plain` is that of the plain loop's time in the same round over
    its own."""
    tokens = batch * config.sequence
    for group in groups(config, batch, device, compiled):
        samples = measure({name: make() for name, make in group.items()}, device, rounds, steps)
        first = next(iter(samples))
        for name, times in samples.items():
            ms = statistics.median(times)
            flops = flops_per_token(config, config.sequence) * tokens / ms * 1e3
            yield {
                "contender": name,
                "ms": ms,
                "min": min(times),
                "max": max(times),
                "tokens_per_second": tokens / ms * 1e3,
                "utilisation": flops / peak,
                "ratio_to_plain": statistics.median(a / b for a, b in zip(samples[first], times, strict=True)),
                "samples": times,
            }
        clear(device)


def clear(device: str) -> None:
    """Gives the memory of what is gone back."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        forget_most_allocated(torch.device(device))


def checks(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name, policy in RECOMPUTE.items():
        yield check_losses(arguments.device, f"recompute {name}", 1e-2, recompute=policy)
    if not arguments.no_compile:
        yield check_losses(arguments.device, "compiled blocks", 2e-2, compile=True)


def times(arguments: argparse.Namespace, record: Record) -> None:
    device, compiled = arguments.device, not arguments.no_compile
    peak = measure_peak_flops(torch.device(device), torch.bfloat16)
    for preset in arguments.preset.split(","):
        config = PRESETS[preset]
        batch = max(1, arguments.tokens // config.sequence)
        print(
            f"\n{hardware(device)}, {preset}, bf16, {arguments.tokens} tokens a step, a product reaches "
            f"{peak / 1e12:.1f} TFLOP/s"
        )
        table: list[dict[str, Any]] = []
        for row in measure_groups(config, batch, device, arguments.rounds, arguments.steps, compiled, peak):
            table.append(row)
            record.keep(peak_flops=peak, tables={preset: table})
            show(row)


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['contender']:32s} {row['ms']:9.2f} ms/step ({row['min']:.2f}..{row['max']:.2f}) "
        f"{row['tokens_per_second']:11.0f} tokens/s"
        f" {row['utilisation']:6.1%} of the peak  x{row['ratio_to_plain']:.3f}",
        flush=True,
    )


def main() -> None:
    parser = options("train")
    parser.add_argument("--preset", default="124m,1.3b", help=f"of {', '.join(PRESETS)}")
    parser.add_argument("--tokens", type=int, default=16384, help="a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled rows")
    run("gpu_train", parser.parse_args(), checks, times)


if __name__ == "__main__":
    main()
