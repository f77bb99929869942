"""Question: what does training cost where the device's memory is not enough, and how large a model can be trained?

    python3 -m benchmarks.gpu.offload [--device cuda] [--checks] [--preset 1.3b] [--tokens 16384] [--steps 5]
    [--share 50,25] [--only rates,budgets,largest]

Checks first: losses with plan.memory, at any budget, updates at once or deferred, follow those without. Then
    rates      link between host and device, host memory, AdamW on the host, disk
    budgets    a GPT in bf16, blocks recomputed: without plan.memory, without a budget; torch FSDP2 with
               CPUOffloadPolicy, DeepSpeed ZeRO-3 with everything on the host where it is installed; with SHARE percent
               of what it takes without plan.memory, updates at once and deferred. One after the other, each alone in
               memory. Stalls: what the computation waits for weights
    largest    what `shoal plan --memory` says would fit in HALF of what is free here, trained for two steps
Writes results/gpu_offload.json. `--device cpu --preset 1m --tokens 256` runs the same road without a GPU.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import shoal.assembly.storage
from benchmarks.executors import Planned
from benchmarks.gpu.peers import LR, deepspeed_step, fsdp2_step
from benchmarks.gpu.rates import all_rates
from benchmarks.gpu.records import Record, check, hardware, options, run, synchronise, worst
from benchmarks.gpu.rows import rows
from benchmarks.gpu.train import SMALL, clear
from shoal import Engine, Plan
from shoal.chunks.movement import fetched
from shoal.comm import World
from shoal.device import most_allocated
from shoal.errors import BudgetExceeded
from shoal.models import GPT, PRESETS, GPTConfig, build, causal_lm
from shoal.planner import Machine, Subject, dry_run, family, largest, predict
from shoal.precision import precision as precision_named

WARM_UP = 2
HALF = 0.5
SPLIT = {"name": "bf16", "master": "split"}


class Stalled(Planned):
    """Says how long the computation has waited for weights."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    def _arrive(self, place: int) -> None:
        if torch.cuda.is_available() and self._lane._stream is not None:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            super()._arrive(place)
            after.record()
            self._events.append((before, after))
            return
        began = time.perf_counter()
        super()._arrive(place)
        self._seconds += time.perf_counter() - began

    def stalled_ms(self) -> float:
        """Since the last call; the device has finished."""
        found = self._seconds * 1e3 + sum(before.elapsed_time(after) for before, after in self._events)
        self._events, self._seconds = [], 0.0
        return found


def engine(
    factory: Any, batch: int, device: str, memory: Any, precision: Any = "bf16", recompute: str = "full"
) -> Engine:
    with mock.patch.object(shoal.assembly.storage, "Executor", Stalled):
        return Engine(
            factory,
            causal_lm,
            partial(torch.optim.AdamW, lr=LR),
            Plan(memory=memory, recompute=recompute),
            global_batch=batch,
            microbatch=batch,
            precision=precision,
            world=World.single(device),
        )


def losses(device: str, memory: Any) -> list[float]:
    running = engine(partial(GPT, SMALL), 4, device, memory)
    try:
        data = rows(SMALL.vocab_size, SMALL.sequence, 32)
        return [running.step(batch).loss for batch in running.batches(data, steps=8)]
    finally:
        running.close()


def tight(device: str) -> tuple[int, list[float]]:
    """A budget for SMALL that is little larger than refusals of smaller ones say, and the losses under it."""
    budget = 1000
    while True:
        try:
            return budget, losses(device, {"device": budget})
        except BudgetExceeded as refusal:
            assert refusal.needed > budget
            budget = refusal.needed + refusal.needed // 20


def check_losses(device: str) -> list[dict[str, Any]]:
    """Updates on the host round as the device's do but for the last bits."""
    plain, (budget, within) = losses(device, None), tight(device)
    runs = {"no budget": losses(device, {}), f"{budget} bytes": within}
    runs |= {f"updates {update}": losses(device, {"update": update}) for update in ("at once", "deferred")}
    return [
        check(f"plan.memory, {name}: largest relative difference of 8 losses from none", worst(seen, plain), 5e-3)
        for name, seen in runs.items()
    ]


def timed(step: Callable[[], Any], device: str, steps: int) -> float:
    """Milliseconds a step, after the first ones, which record and warm up."""
    for _ in range(WARM_UP):
        step()
    synchronise(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    synchronise(device)
    return (time.perf_counter() - began) / steps * 1e3


def peak(device: str, running: Engine | None = None) -> int:
    """Bytes: the most that was allocated on the device since `clear`; on a CPU what the tier has counted."""
    if device.startswith("cuda"):
        return most_allocated(torch.device(device)) or 0
    return running.parts.tier.most_in_all if running is not None and running.parts.tier is not None else 0


def of_engine(config: GPTConfig, batch: int, device: str, memory: Any, steps: int) -> dict[str, Any]:
    """A row of the table; of a budget that is too small, with the smallest that would do."""
    clear(device)
    running = engine(partial(GPT, config), batch, device, memory)

    def step() -> None:
        running.step(next(batches))

    batches = running.batches(rows(config.vocab_size, config.sequence, batch * 4))
    executor = running.parts.gather.executor if running.parts.gather else None
    assert executor is None or isinstance(executor, Stalled)
    try:
        for _ in range(WARM_UP):
            step()
        synchronise(device)
        came, _ = (executor.bytes_in, executor.stalled_ms()) if executor else (0, 0)
        ms = timed(step, device, steps)
        row: dict[str, Any] = {"ms": ms, "peak": peak(device, running)}
        row["tokens_per_second"] = batch * config.sequence / ms * 1e3
        if executor:
            row["moved"] = (executor.bytes_in - came) // (steps + WARM_UP)
            row["planned"] = fetched(executor.recorded[1], executor.sizes)
            row["stalled_ms"] = executor.stalled_ms() / (steps + WARM_UP)
        return {"plan.memory": memory, **row}
    except BudgetExceeded as refusal:
        wanted = refusal.needed
    finally:
        running.close()
    return of_engine(config, batch, device, {**memory, "device": wanted + wanted // 50}, steps)


def of_peer(make: Callable[[], Callable[[], Any]], tokens: int, device: str, steps: int) -> dict[str, Any]:
    clear(device)
    ms = timed(make(), device, steps)
    return {"ms": ms, "peak": peak(device), "tokens_per_second": tokens / ms * 1e3}


def budgets(config: GPTConfig, batch: int, device: str, shares: list[int], steps: int) -> Iterator[dict[str, Any]]:
    """The rows of the section, each as it is measured."""
    ours = partial(of_engine, config, batch, device, steps=steps)
    found = {}
    whole_model: dict[str, dict[str, Any] | None] = {"no offload": None, "no budget": {}}
    for name, memory in whole_model.items():
        found[name] = ours(memory=memory)
        yield {"contender": name, **found[name]}
    whole = max(row["peak"] for row in found.values())
    peers = {
        "fsdp2, CPUOffloadPolicy": partial(fsdp2_step, config, batch, device, offload=True, recompute=True),
        "deepspeed zero 3, offload": partial(deepspeed_step, config, batch, device, recompute=True),
    }
    for name, make in peers.items():
        try:
            yield {"contender": name, **of_peer(make, batch * config.sequence, device, steps)}
        except Exception as error:  # a peer that is not installed or does not run here leaves out its row only
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
    for share in shares:
        for update in ("deferred", "at once"):
            row = ours(memory={"device": whole * share // 100, "update": update})
            yield {"contender": f"{share}%, {update}", **row}


def machine(device: str) -> Machine:
    """HALF of what is free here."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    host = next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
    free = torch.cuda.mem_get_info()[0] if device.startswith("cuda") else None
    return Machine(int(HALF * host), None if free is None else int(HALF * free))


def largest_model(preset: str, batch: int, device: str, free: Machine, most: int = 2**12) -> dict[str, Any]:
    """The largest of the preset's family that `free` holds, and two steps of it."""
    table = {"name": "gpt", "preset": preset}
    memory: dict[str, Any] = {} if free.device is None else {"device": free.device}
    found = family(table, build(table).values)
    assert found is not None
    member_of, plan, kind = found.member, Plan(memory=memory, recompute="full"), precision_named(SPLIT)

    def left(size: int) -> int:
        model = build(member_of(size))
        sample = rows(model.values["vocab_size"], model.values["sequence"], 1)[0]
        recording = dry_run(Subject(model.factory, model.loss, sample, batch, kind, plan))
        return predict(recording, partial(torch.optim.AdamW, lr=LR), plan, kind, free, 1).free

    size = largest(left, most)
    if size == 0:
        raise ValueError(f"nothing of this family fits in {free}")
    member = member_of(size)
    model = build(member)
    began = time.perf_counter()
    running = engine(model.factory, batch, device, memory, SPLIT)
    built = time.perf_counter() - began
    data = rows(model.values["vocab_size"], model.values["sequence"], 2 * batch)
    seen = []
    try:
        for global_batch in running.batches(data, steps=2):
            began = time.perf_counter()
            seen.append(running.step(global_batch).loss)
    finally:
        running.close()
    parameters = sum(parameter.numel() for parameter in running.parameters.values())
    return {
        "model": member,
        "parameters": parameters,
        "build_s": built,
        "step_s": time.perf_counter() - began,
        "losses": seen,
    }


def show(row: dict[str, Any]) -> None:
    moved = f" {row['moved'] / 1e9:8.2f} GB in (plan {row['planned'] / 1e9:.2f})" if "moved" in row else ""
    stalled = f"  stalled {row['stalled_ms']:8.1f} ms" if "stalled_ms" in row else ""
    speed = f"{row['ms']:9.1f} ms/step {row['tokens_per_second']:10.0f} tokens/s"
    print(f"{row['contender']:28s} {speed} {row['peak'] / 2**30:7.2f} GiB{moved}{stalled}", flush=True)


def times(arguments: argparse.Namespace, record: Record) -> None:
    """Each figure is kept and printed as it is measured."""
    device, only, config = arguments.device, arguments.only.split(","), PRESETS[arguments.preset]
    batch = max(1, arguments.tokens // config.sequence)
    if "rates" in only:
        rates = all_rates(device, arguments.mebibytes, 5, arguments.disk)
        record.keep(rates=rates)
        for name, figure in rates.items():
            print(f"{name:32s} {figure:9.2f}", flush=True)
    if "budgets" in only:
        print(f"\n{hardware(device)}, {arguments.preset}, bf16, {arguments.tokens} tokens a step, blocks recomputed")
        table: list[dict[str, Any]] = []
        for row in budgets(config, batch, device, [*map(int, arguments.share.split(","))], arguments.steps):
            table.append(row)
            record.keep(budgets=table)
            show(row)
        clear(device)
    if "largest" in only:
        found = largest_model(arguments.preset, batch, device, machine(device))
        record.keep(largest=found)
        bad = sum(not math.isfinite(loss) for loss in found["losses"])
        record.check([check("the largest model: losses that are not finite", bad, 0)])
        print(
            f"largest: {found['parameters'] / 1e9:.2f}B parameters, built in {found['build_s']:.0f} s, "
            f"{found['step_s']:.1f} s a step"
        )


def main() -> None:
    parser = options("offload")
    parser.add_argument("--preset", default="1.3b", choices=list(PRESETS))
    parser.add_argument("--tokens", type=int, default=16384, help="a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--share", default="50,25", help="percent of what training takes without plan.memory")
    parser.add_argument("--mebibytes", type=int, default=1024, help="of the copies that are timed")
    parser.add_argument("--disk", type=Path, help="a directory on the disk that is timed")
    parser.add_argument("--only", default="rates,budgets,largest")
    run("gpu_offload", parser.parse_args(), lambda arguments: check_losses(arguments.device), times)


if __name__ == "__main__":
    main()
