"""Question `offload`: what does a budget of the device's memory cost, in bytes moved and in time?

    python -m benchmarks.offload [--share 75,50,25] [--rate 1,0.5] [--rounds 5] [--steps 5] [--disk DIRECTORY] [--quick]

GPT of 33.7M parameters in fp32, one process of two threads, 2 rows of 64 tokens; the device is a part of the same
memory, and the link to it is a copy that takes bytes / RATE (in GB/s) on the lane. SHARE is the percentage of the
weights' bytes that there is room for where everything else on the device (activations, gradients on loan) takes most;
at other moments there is more. Sets:

    budget     who moves weights: Shoal's plan, what was used longest ago goes and comes on demand (LRU), fetch and
               release with one ahead (FSDP's way). The limit is Shoal without a budget over the same link: each weight
               comes once a step
    update     plan.memory.update at once or deferred, over the same link
    disk       optimizer state on the disk or on the host

Bytes are counted by the plan and by the run; by formula also for a trace in which the optimizer's state comes to the
device, too. Gradients going home are not slowed down, alike for all. Writes results/offload.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

import shoal.assembly.storage
from benchmarks import harness
from benchmarks.executors import RULES, Planned, throttled
from benchmarks.processes import ProcessGroup, Step
from benchmarks.targets import Target, judge, print_targets
from benchmarks.workload import CASES, LEARNING_RATE, Case, Tokens, build_model, sum_loss
from shoal import Engine, Plan
from shoal.chunks.movement import Trace, fetched, fetched_and_released, fetched_by_recency, plan
from shoal.comm import World

CHUNK = "4MiB"
LIMIT, OURS = "no budget", "planned"
STATE = 2
"""AdamW's state in fp32 weights."""
STEPS_OF_TRACE = 6
"""So many steps in a row are counted where state belongs to the trace: what is there at the end of a step serves the
next."""
NOTES = {
    LIMIT: "plan.memory = {}: each weight comes once a step",
    "no offload": "weights on the device for good",
    "planned": "Shoal: who goes is who is used again latest, the next comes ahead",
    "on demand": "LRU: comes when it is asked for, goes who was used longest ago",
    "fetch and release": "goes after its use; the next comes meanwhile",
    "at once": "plan.memory.update: the step waits for all updates",
    "deferred": "the next forward goes on meanwhile",
    "host": "optimizer state in memory",
    "disk": "plan.memory.disk: read, updated, written, each generation crash-safe",
}
TARGETS = [
    *(
        Target(f"{share} {rule} {what}", f"{share}% of the weights fit: {rule}'s {what} over ours", 1.0)
        for share in (75, 50, 25)
        for rule in ("on demand", "fetch and release")
        for what in ("bytes", "time")
    ),
    *(
        Target(f"{share} state", f"{share}% of weights and optimizer state fit: LRU's bytes over ours", bound)
        for share, bound in ((75, 2.0), (50, 1.5), (25, 1.2))
    ),
    Target("executed", "bytes moved over bytes planned", 1.0, at_least=False),
    Target("deferred", "step with updates at once over deferred", 1.0),
]

_running: Engine
_moved = 0
_update_seconds: list[float] = []


def train(case: Case, memory: dict[str, Any] | None, rule: str = OURS, rate: float | None = None) -> Step:
    """Shoal's engine on one rank; weights move by `rule` over a link of `rate` bytes a second."""
    global _running
    with mock.patch.object(shoal.assembly.storage, "Executor", RULES[rule]):
        _running = engine = Engine(
            build_model,
            sum_loss,
            partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
            Plan(memory=memory),
            global_batch=case.batch,
            microbatch=case.batch,
            world=World.single("cpu"),
        )
    if rate is not None:
        throttled(engine.parts.chunks, rate)
    _time_updates(engine)
    batches = engine.batches(Tokens(case.sequence))

    def step() -> None:
        global _moved
        before = engine.parts.gather.executor.bytes_in if engine.parts.gather else 0
        engine.step(next(batches))
        _moved = engine.parts.gather.executor.bytes_in - before if engine.parts.gather else 0

    return step


def _time_updates(engine: Engine) -> None:
    apply = engine.optimizer.apply

    def timed(*arguments: Any) -> None:
        began = time.perf_counter()
        apply(*arguments)
        _update_seconds.append(time.perf_counter() - began)

    vars(engine.optimizer)["apply"] = timed


def moves() -> dict[str, Any]:
    """Of the engine that runs in this process: bytes a step by its plan, by the other rules for the same trace and
    room, and as they came. `others`: what all else on the device takes at most."""
    executor, tier = _running.parts.gather.executor, _running.parts.tier  # type: ignore[union-attr]
    assert isinstance(executor, Planned) and tier is not None
    trace, ticks = executor.recorded
    return {
        **by_rule(trace, executor.sizes, executor.room),
        "plan": fetched(ticks, executor.sizes),
        "moved": _moved,
        "weights": sum(executor.sizes),
        "others": executor.others,
        "most": tier.most_in_all,
        "trace": [sorted(blocks) for blocks in trace],
        "sizes": list(executor.sizes),
    }


def by_rule(trace: Trace, sizes: Sequence[int], room: int | Sequence[int]) -> dict[str, int]:
    """The bytes that each rule brings in for `trace`."""
    return {
        "planned": fetched(plan(trace, sizes, room), sizes),
        "on demand": fetched_by_recency(trace, sizes, room),
        "fetch and release": fetched_and_released(trace, sizes),
    }


def with_state(trace: Trace, sizes: Sequence[int], steps: int) -> tuple[Trace, list[int]]:
    """`steps` steps in which each weight's state comes to the device for its update, the deepest layers first, and
    their blocks' sizes."""
    count = len(sizes)
    updates = [frozenset({block, count + block}) for block in range(count)]
    return (*trace, *updates) * steps, [*sizes, *(STATE * size for size in sizes)]


def state_by_share(trace: Trace, sizes: Sequence[int], shares: Sequence[int]) -> list[dict[str, Any]]:
    """The bytes of each rule where the optimizer's state belongs to the trace, a step."""
    longer, blocks = with_state(trace, sizes, STEPS_OF_TRACE)
    rows = []
    for share in shares:
        found = by_rule(longer, blocks, sum(blocks) * share // 100)
        rows.append({"share": share, **{rule: nbytes // STEPS_OF_TRACE for rule, nbytes in found.items()}})
    return rows


def timed(
    groups: dict[str, ProcessGroup], rounds: int, case: Case, limit: str, what: str, call: Any = None, **more: Any
) -> dict[str, Any]:
    """One set of the record; what `call` says in each contender's process goes into its row."""
    samples = harness.measure(groups, rounds, case.steps)
    result = harness.result_of(samples, limit, NOTES, case=what, precision="fp32", steps=case.steps, **more)
    for name, group in groups.items():
        if call is not None and name != "no offload":
            result["contenders"][name] |= group.call(call)[0]
    return result


def run_budget(case: Case, share: int, rate: float, rounds: int) -> dict[str, Any]:
    """The set `budget` for one share and rate (GB/s)."""
    with ExitStack() as stack:

        def start(memory: dict[str, Any] | None, rule: str = OURS) -> ProcessGroup:
            arguments = {"case": case, "memory": memory, "rule": rule, "rate": rate * 1e9}
            return stack.enter_context(ProcessGroup(train, arguments, size=1, threads=2))

        groups = {LIMIT: start({"chunk": CHUNK}), "no offload": start(None)}
        free = groups[LIMIT].call(moves)[0]
        device = free["others"] + free["weights"] * share // 100
        groups |= {rule: start({"chunk": CHUNK, "device": device}, rule) for rule in RULES}
        what = f"budget, {share}% of {free['weights'] / 2**20:.0f} MiB of weights, {rate:g} GB/s"
        return timed(groups, rounds, case, LIMIT, what, moves, share=share, rate=rate, device=device)


def run_update(case: Case, share: int, rate: float, rounds: int, device: int) -> dict[str, Any]:
    """The set `update`."""
    with ExitStack() as stack:
        groups = {}
        for name in ("at once", "deferred"):
            memory = {"chunk": CHUNK, "device": device, "update": name}
            arguments = {"case": case, "memory": memory, "rate": rate * 1e9}
            groups[name] = stack.enter_context(ProcessGroup(train, arguments, size=1, threads=2))
        what = f"update, {share}% of the weights, {rate:g} GB/s"
        return timed(groups, rounds, case, "at once", what, share=share, rate=rate)


def pages() -> dict[str, Any]:
    """Of the engine that runs in this process: milliseconds of an update, and MB/s that the disk was read and written
    meanwhile."""
    seconds, pager = statistics.median(_update_seconds[1:]), _running.parts.pager
    found: dict[str, Any] = {"update_ms": seconds * 1e3}
    if pager is not None:
        nbytes = sum(page.moving for page in pager.pages), sum(page.nbytes_whole for page in pager.pages)
        found |= {f"{name}_mb_s": each / seconds / 1e6 for name, each in zip(("read", "written"), nbytes, strict=True)}
    return found


def run_disk(case: Case, rounds: int, directory: Path) -> dict[str, Any]:
    """The set `disk`."""
    with ExitStack() as stack:
        path = stack.enter_context(tempfile.TemporaryDirectory(dir=directory, prefix="shoal-offload-"))
        memories: dict[str, dict[str, Any]] = {"host": {"chunk": CHUNK}, "disk": {"chunk": CHUNK, "disk": path}}
        groups = {
            name: stack.enter_context(ProcessGroup(train, {"case": case, "memory": memory}, size=1, threads=2))
            for name, memory in memories.items()
        }
        return timed(groups, rounds, case, "host", "disk", pages)


def figures(sets: Sequence[dict[str, Any]], state: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What TARGETS name; times at the slowest link."""
    found = {f"{row['share']} state": row["on demand"] / row["planned"] for row in state}
    budgets = [each for each in sets if each["case"].startswith("budget")]
    for each in (each for each in budgets if each["rate"] == min(other["rate"] for other in budgets)):
        ours = each["contenders"][OURS]
        for rule in ("on demand", "fetch and release"):
            theirs = each["contenders"][rule]
            found[f"{each['share']} {rule} bytes"] = theirs["moved"] / ours["moved"]
            found[f"{each['share']} {rule} time"] = _ratio(theirs, ours)
    if budgets:
        found["executed"] = max(
            each["contenders"][OURS]["moved"] / each["contenders"][OURS]["plan"] for each in budgets
        )
    for each in sets:
        if each["case"].startswith("update"):
            found["deferred"] = _ratio(each["contenders"]["at once"], each["contenders"]["deferred"])
    return found


def _ratio(theirs: dict[str, Any], ours: dict[str, Any]) -> float:
    pairs = zip(theirs["samples_ms"], ours["samples_ms"], strict=True)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


def show_moves(sets: Sequence[dict[str, Any]], state: Sequence[dict[str, Any]]) -> None:
    table = Table(title="MB that come to the device in a step", title_justify="left")
    for heading in ("set", "no budget", *RULES, "by our plan"):
        table.add_column(heading, justify="left" if heading == "set" else "right")
    for each in (each for each in sets if each["case"].startswith("budget")):
        rows = each["contenders"]
        moved = [rows[name]["moved"] for name in (LIMIT, *RULES)] + [rows[OURS]["plan"]]
        table.add_row(each["case"], *(f"{nbytes / 1e6:.1f}" for nbytes in moved))
    for row in state:
        counted = (f"{row[rule] / 1e6:.1f}" for rule in RULES)
        table.add_row(f"by formula, with optimizer state, {row['share']}% of all", "", *counted, "")
    Console(width=160).print(table)


def show_disk(result: dict[str, Any]) -> None:
    for name, row in result["contenders"].items():
        rates = (
            f", reading {row['read_mb_s']:.0f} MB/s, writing {row['written_mb_s']:.0f} MB/s"
            if "read_mb_s" in row
            else ""
        )
        print(f"update with optimizer state on {name}: {row['update_ms']:.1f} ms{rates}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=lambda text: [int(part) for part in text.split(",")], default=[75, 50, 25])
    parser.add_argument("--rate", type=lambda text: [float(part) for part in text.split(",")], default=[1.0, 0.5])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    arguments = harness.parse(parser, "a round of one step at 50%, 1 GB/s", rounds=1, steps=1, share=[50], rate=[1.0])
    case = Case("offload", CASES["communication"].sequence, CASES["communication"].batch, arguments.steps)
    sets = [run_budget(case, share, rate, arguments.rounds) for rate in arguments.rate for share in arguments.share]
    last, one = sets[-1], sets[-1]["contenders"][OURS]
    sets.append(run_update(case, last["share"], last["rate"], arguments.rounds, last["device"]))
    sets.append(run_disk(case, arguments.rounds, arguments.disk))
    state = state_by_share(tuple(frozenset(blocks) for blocks in one["trace"]), one["sizes"], [75, 50, 25])
    for each in sets:
        harness.print_table(each)
    show_moves(sets, state)
    show_disk(sets[-1])
    judged = judge(TARGETS, figures(sets, state))
    print_targets(judged)
    results = {"sets": sets, "with_optimizer_state": state, "targets": judged}
    print(f"record: {harness.write_record('offload', {**vars(arguments), 'disk': None}, results)}")


if __name__ == "__main__":
    main()
