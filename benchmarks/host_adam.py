"""Question `host_adam`: how long does AdamW on the host take, a parameter?

    python -m benchmarks.host_adam [--elements 32000000] [--rounds 9] [--quick]

One process, all its cores; tensors larger than the caches; gradients are to be divided by a factor, as after clipping.
Contenders in turn; nanoseconds a parameter, medians of rounds. DeepSpeed's kernel is compiled at the first call. Writes
results/host_adam.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.targets import Target, judge, print_targets
from shoal.optim.fused.host_adam import adam_update

LR, BETAS, EPS, DECAY, FACTOR = 1e-3, (0.9, 0.95), 1e-8, 0.1, 0.5
TARGETS = (
    Target("torch fused", "AdamW in fp32, times faster than torch's fused kernel", 1.0),
    Target("DeepSpeed", "AdamW in fp32, times faster than DeepSpeed's CPUAdam", 1.0),
    Target(
        "torch fused, bf16",
        "bf16 gradients in, bf16 weights out, times faster than torch's fused kernel with casts",
        1.0,
    ),
    Target(
        "DeepSpeed, bf16", "bf16 gradients in, bf16 weights out, times faster than DeepSpeed's CPUAdam with casts", 1.0
    ),
)
PAIRS = {
    "torch fused": ("shoal", "torch fused"),
    "DeepSpeed": ("shoal", "DeepSpeed CPUAdam"),
    "torch fused, bf16": ("shoal, bf16", "torch fused, bf16"),
    "DeepSpeed, bf16": ("shoal, bf16", "DeepSpeed CPUAdam, bf16"),
}
NOTES = {
    "shoal": "fp32 gradients, masters and moments",
    "torch fused": "torch._fused_adamw_ with grad_scale",
    "DeepSpeed CPUAdam": "gradients multiplied in place first, as its engine does",
    "shoal, bf16": "bf16 gradients in, bf16 weights out, the same pass",
    "torch fused, bf16": "gradients cast to fp32, fused update, weights cast to bf16",
    "DeepSpeed CPUAdam, bf16": "gradients cast to fp32 and multiplied, update, weights cast to bf16",
    "shoal, split": "as bf16, and masters kept as the lower halves: 2 bytes instead of 4",
}


class State:
    """Gradients, masters, moments and weights of one contender."""

    def __init__(self, elements: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.master = torch.randn(elements, generator=draw)
        self.grad = torch.randn(elements, generator=draw)
        self.low, self.weights = self.grad.bfloat16(), self.master.bfloat16()
        self.m, self.v = torch.zeros(elements), torch.zeros(elements)
        self.step = torch.zeros(())


def shoal(elements: int, low: bool, split: bool = False) -> Callable[[], None]:
    state = State(elements)
    master = torch.zeros(elements, dtype=torch.int16) if split else state.master

    def update() -> None:
        state.step += 1
        adam_update(
            master, state.low if low else state.grad, state.m, state.v, int(state.step), lr=LR, betas=BETAS, eps=EPS,
            weight_decay=DECAY, decoupled=True, grad_factor=FACTOR, weights=state.weights if low else None,
        )  # fmt: skip

    return update


def torch_fused(elements: int, low: bool) -> Callable[[], None]:
    state = State(elements)
    master = torch.nn.Parameter(state.master)
    optimizer = torch.optim.AdamW([master], LR, BETAS, EPS, DECAY, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1 / FACTOR), torch.tensor(0.0)  # type: ignore[attr-defined]

    def update() -> None:
        master.grad = state.grad.copy_(state.low) if low else state.grad
        optimizer.step()
        if low:
            state.weights.copy_(master.detach())

    return update


def deepspeed(elements: int, low: bool) -> Callable[[], None]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    state = State(elements)
    master = torch.nn.Parameter(state.master)
    optimizer = DeepSpeedCPUAdam([master], LR, betas=BETAS, eps=EPS, weight_decay=DECAY, adamw_mode=True)

    def update() -> None:
        master.grad = (state.grad.copy_(state.low) if low else state.grad).mul_(FACTOR)
        optimizer.step()
        if low:
            state.weights.copy_(master.detach())

    return update


def contenders(elements: int) -> dict[str, Callable[[], None]]:
    return {
        "shoal": shoal(elements, low=False),
        "torch fused": torch_fused(elements, low=False),
        "DeepSpeed CPUAdam": deepspeed(elements, low=False),
        "shoal, bf16": shoal(elements, low=True),
        "torch fused, bf16": torch_fused(elements, low=True),
        "DeepSpeed CPUAdam, bf16": deepspeed(elements, low=True),
        "shoal, split": shoal(elements, low=True, split=True),
    }


def measure(updates: Mapping[str, Callable[[], None]], elements: int, rounds: int) -> dict[str, list[float]]:
    """Nanoseconds a parameter of each contender in each round; a first one, for page faults and compilers, is not
    counted."""
    found: dict[str, list[float]] = {name: [] for name in updates}
    for round_ in range(rounds + 1):
        for name, update in updates.items():
            began = time.perf_counter()
            update()
            if round_:
                found[name].append((time.perf_counter() - began) / elements * 1e9)
    return found


def ratios(found: Mapping[str, list[float]]) -> dict[str, float]:
    """How many times faster ours was, round by round, as medians."""
    return {
        key: statistics.median(theirs / ours for ours, theirs in zip(found[ours], found[theirs], strict=True))
        for key, (ours, theirs) in PAIRS.items()
    }


def show(found: Mapping[str, list[float]], threads: int) -> None:
    table = Table(title=f"AdamW on the host, {threads} threads: nanoseconds a parameter", title_justify="left")
    for heading in ("contender", "median", "quartiles", "what it is"):
        table.add_column(heading, justify="right" if heading in ("median", "quartiles") else "left")
    for name, figures in found.items():
        low, middle, high = harness.quartiles(figures)
        table.add_row(name, f"{middle:.3f}", f"{low:.3f}..{high:.3f}", NOTES[name])
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=32_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = harness.parse(parser, "a million elements, two rounds", elements=1_000_000, rounds=2)
    sets: list[dict[str, Any]] = []
    updates = contenders(arguments.elements)
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        found = measure(updates, arguments.elements, arguments.rounds)
        show(found, threads)
        judged = judge(TARGETS, ratios(found))
        print_targets(judged)
        sets.append({"threads": threads, "nanoseconds": found, "targets": judged})
    print(f"record: {harness.write_record('host_adam', vars(arguments), sets, ('deepspeed',))}")


if __name__ == "__main__":
    main()
