"""Question `pp`: what does a pipeline lose beside the bubble of its schedule, with Shoal and with
torch.distributed.pipelining?

    python -m benchmarks.pp [--schedules gpipe,1f1b,interleaved,zb1p,zbv] [--precision fp32] [--rounds 4] [--quick]
    python -m benchmarks.pp --sleeping [--stages 4,8]

2 processes of one thread have a stage each (or two, or a V of them) of the GPT of 33.7M parameters, and see the same 8
microbatches of a row of 256 tokens; both sides cut between the same blocks. The limit of a schedule is its simulation
with what each action takes when nobody waits: Shoal's engine, all ranks at once, whose messages are not sent, gives
these times in the same round. So the limit has the schedule's own bubble and nothing else; that of 2bw, which has no
flush, has none: it is the work of the slower rank.

`--sleeping`: stages that sleep in place of computing, as many as there are, so that 4 and 8 of them stand on any
machine: the bubble, the share of the ranks' time in which none of their actions runs, against the simulated one; and
the share in which they do not sleep, which has in it all that Shoal does around and inside an action.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.contenders import Entry
from benchmarks.processes import ProcessGroup, Step
from benchmarks.targets import Target, judge, print_targets
from benchmarks.torch_stages import torch_stages
from benchmarks.workload import LEARNING_RATE, Case, Tokens, build_model, mean_loss, sum_loss
from shoal.comm.ledger import Span
from shoal.pipeline import Costs, Kind, Schedule, make_schedule, simulate

RANKS, MICROBATCHES = 2, 8
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p", "zbv", "2bw")
THEIRS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb1p": "",
    "zbv": "ScheduleZBVZeroBubble",
    "2bw": "",
}
"""torch has zb1p over several chunks a rank only, and nothing without a flush."""
CASE = Case("8x256", sequence=256, batch=8, steps=2)
STAGES: dict[str, list[int]] = {
    "gpipe": [5, 3],
    "2bw": [5, 3],
    "1f1b": [5, 3],
    "zb1p": [5, 3],
    "interleaved": [3, 2, 2, 1],
    "zbv": [2, 3, 2, 1],
}
"""Blocks of each stage: the head is about as heavy as one and a half."""
TARGETS = [
    *(
        Target(f"{precision} {name} limit", f"{precision}, {name}: share of the limit with its bubble", 0.97)
        for precision in ("fp32", "bf16")
        for name in SCHEDULES
    ),
    *(
        Target(f"{precision} {name} torch", f"{precision}, {name}: torch's time over ours", 1.0)
        for precision in ("fp32",)
        for name in SCHEDULES
        if THEIRS[name]
    ),
]


def schedule_of(name: str, ranks: int = RANKS, microbatches: int = MICROBATCHES) -> Schedule:
    return make_schedule(name, ranks, microbatches)


class _Silent:
    """Of a pair of stages: what is received is what came first, what is sent is gone."""

    def __init__(self, group: Any) -> None:
        self._group, self.rank, self.size = group, group.rank, group.size
        self._seen: dict[tuple[int, ...], Tensor] = {}

    def send(self, tensor: Tensor, dst: int, purpose: str = "") -> None:
        pass

    def recv(self, tensor: Tensor, src: int, purpose: str = "") -> Tensor:
        key = tuple(tensor.shape)
        if key not in self._seen:
            self._seen[key] = torch.randn(tensor.shape).mul_(1e-3).to(tensor.dtype)
        return tensor.copy_(self._seen[key])


def shoal(case: Case, precision: str, schedule: str, silent: bool = False) -> Step:
    """Shoal's engine with plan.pp over all ranks; `silent`: nobody waits, and `costs` says what each action took."""
    from shoal import Engine, Plan
    from shoal.launch import join
    from shoal.pipeline.p2p import Mail

    if silent:
        opened = Mail.open

        def open_silently(self: Any, pairs: Any) -> None:
            opened(self, pairs)
            self._groups = {key: _Silent(group) for key, group in self._groups.items()}

        Mail.open = open_silently  # type: ignore[method-assign]
    engine = Engine(
        build_model,
        sum_loss,
        partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
        Plan(pp=int(os.environ["WORLD_SIZE"]), schedule=schedule, stages=STAGES[schedule]),
        global_batch=case.batch,
        microbatch=case.batch // MICROBATCHES,
        precision=precision,
        world=join(),
    )
    batches = engine.batches(Tokens(case.sequence))

    def step() -> None:
        engine.ledger.recording = silent
        started = time.perf_counter()
        engine.step(next(batches))
        if silent:
            _keep(engine.ledger.take(), time.perf_counter() - started)

    return step


_seconds: dict[str, list[float]] = {}


def _keep(spans: Any, whole: float) -> None:
    """Notes how long each kind of action took, by stage, and what the step took beside them."""
    taken: dict[str, list[float]] = {}
    for span in spans:
        if span.lane == "stage":
            kind = span.name.partition(":")[0]  # F0, B1, ..
            taken.setdefault(kind, []).append(span.seconds)
    for kind, seconds in taken.items():
        _seconds.setdefault(kind, []).append(statistics.mean(seconds))
    _seconds.setdefault("rest", []).append(whole - sum(map(sum, taken.values())))


def costs() -> dict[str, float]:
    """Of this rank: seconds of each action by kind and stage, and of what a step has beside them; forgets them."""
    found = {kind: statistics.median(seconds) for kind, seconds in _seconds.items()}
    _seconds.clear()
    return found


def limit_of(name: str, by_rank: Sequence[Mapping[str, float]]) -> float:
    """Seconds of a step of that schedule, when actions take as long as ranks say and messages nothing."""
    schedule = schedule_of(name)
    known = {kind: seconds for each in by_rank for kind, seconds in each.items()}
    rest = min(each["rest"] for each in by_rank)  # the others wait in theirs
    if not schedule.flushes:  # the slower rank is never idle
        return MICROBATCHES * max(known[f"F{stage}"] + known[f"B{stage}"] for stage in range(schedule.stages)) + rest
    kinds = {(action.kind, action.stage) for order in schedule.orders for action in order}
    simulated = simulate(schedule, Costs({(kind, stage): known[f"{kind}{stage}"] for kind, stage in kinds}))
    return simulated.seconds + rest


def torch_pipelining(case: Case, precision: str, schedule: str) -> Step:
    """torch's PipelineStage and schedule of the same name over gloo, the same cuts; fp32."""
    from torch.distributed import pipelining

    dist.init_process_group("gloo")
    rank, ours = dist.get_rank(), schedule_of(schedule)
    stages = torch_stages(build_model(), STAGES[schedule], ours, rank, torch.device("cpu"))
    kind = getattr(pipelining, THEIRS[schedule])
    single = schedule in ("gpipe", "1f1b")
    run: Any = kind(stages[0] if single else stages, MICROBATCHES, loss_fn=mean_loss)
    optimizer = torch.optim.AdamW(
        [p for stage in stages for p in stage.submod.parameters()], lr=LEARNING_RATE, fused=True
    )
    shares = itertools.cycle(Tokens(case.sequence).shares(case.batch, 0, 1))
    has_first, has_last = 0 in ours.stages_of(rank), ours.stages - 1 in ours.stages_of(rank)

    def step() -> None:
        tokens, labels = next(shares)
        arguments = (tokens,) if has_first else ()
        if has_last:
            run.step(*arguments, target=labels, losses=[])
        else:
            run.step(*arguments)
        optimizer.step()
        optimizer.zero_grad()

    return step


def run_set(precision: str, names: Sequence[str], rounds: int, steps: int) -> list[dict[str, Any]]:
    """A set of the record for each schedule: in each round all contenders of it in turn, the limit among them."""
    found = []
    for name in names:
        entries = {
            "alone": Entry(partial(shoal, schedule=name, silent=True), "nobody waits: for the limit"),
            "shoal": Entry(partial(shoal, schedule=name), f'plan.schedule = "{name}"'),
        }
        if THEIRS[name] and precision == "fp32":
            entries["torch"] = Entry(partial(torch_pipelining, schedule=name), f"torch {THEIRS[name]} over gloo")
        with ExitStack() as stack:
            groups = {}
            for contender, entry in entries.items():
                print(f"{name} {precision}: starting {contender}", flush=True)
                given = {"case": CASE, "precision": precision}
                groups[contender] = stack.enter_context(ProcessGroup(entry.build, given, size=RANKS, warm_up=2))
            groups["alone"].call(costs)
            limits: list[list[float]] = []
            samples: dict[str, list[list[float]]] = {contender: [] for contender in groups}
            idle = dict.fromkeys(groups, 0.0)
            for _ in range(rounds):
                once = harness.measure(groups, 1, steps)
                for contender, each in once.rounds.items():
                    samples[contender] += each
                idle = {contender: max(idle[contender], once.idle_share[contender]) for contender in groups}
                limits.append([1e3 * limit_of(name, groups["alone"].call(costs))])
        del samples["alone"]
        measured = harness.Samples({"limit": limits, **samples}, {"limit": 0.0, **{key: idle[key] for key in samples}})
        notes = {
            "limit": "what the actions take alone, simulated in the schedule's order",
            **{key: entries[key].note for key in samples},
        }
        found.append(harness.result_of(measured, "limit", notes, case=name, precision=precision, steps=steps))
        harness.print_table(found[-1])
    return found


def figures(results: list[dict[str, Any]]) -> dict[str, float]:
    """What TARGETS name."""
    found = {}
    for result in results:
        rows, key = result["contenders"], f"{result['precision']} {result['case']}"
        found[f"{key} limit"] = rows["shoal"]["share"]
        if "torch" in rows:
            found[f"{key} torch"] = harness.times_over(rows, "torch", "shoal")
    return found


# stages that sleep

FORWARD, INPUTS, WEIGHTS = 0.05, 0.05, 0.05
"""Seconds that a rank's part of the model sleeps, for each third of a microbatch."""


class _Sleeps(torch.autograd.Function):
    """Passes `x` on; sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None, None


class Sleeping(nn.Module):
    """A block that sleeps as long as one of `chunks` parts of a rank's model would compute. The `first` has no gradient
    of its input to compute: it sleeps as long for that of its weights."""

    def __init__(self, chunks: int, first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self._chunks, self._weights = chunks, WEIGHTS + first * INPUTS

    def forward(self, x: Tensor) -> Tensor:
        weight = _Sleeps.apply(self.weight, 0.0, self._weights / self._chunks)  # off the way to the input
        return _Sleeps.apply(x, FORWARD / self._chunks, INPUTS / self._chunks) + weight


class Sleepers(nn.Module):
    def __init__(self, stages: int, chunks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sleeping(chunks, not place) for place in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sleeping(schedule: str, microbatches: int) -> Step:
    from shoal import Engine, Plan
    from shoal.launch import join

    ranks = int(os.environ["WORLD_SIZE"])
    one = schedule_of(schedule, ranks, microbatches)

    def loss(model: nn.Module, mb: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        return model(mb["x"]).sum(), 1

    data = [{"x": torch.ones(4)} for _ in range(microbatches)]
    plan = Plan(pp=ranks, schedule=schedule, stages=[1] * one.stages)
    engine = Engine(
        partial(Sleepers, one.stages, one.chunks),
        loss,
        partial(torch.optim.SGD, lr=0.0),
        plan,
        global_batch=microbatches,
        microbatch=1,
        world=join(),
    )
    batches = engine.batches(data)
    engine.ledger.recording = True

    def step() -> None:
        started = time.perf_counter()
        engine.step(next(batches))
        _slept.append((busy_of(engine.ledger.take()), time.perf_counter() - started))

    return step


_slept: list[tuple[float, float]] = []


def busy_of(spans: Any) -> float:
    """Seconds in which a rank ran actions."""
    return sum(span.seconds for span in spans if isinstance(span, Span) and span.lane == "stage")


def slept() -> list[tuple[float, float]]:
    """Of this rank's steps: seconds in which it ran actions, and all seconds; forgets them."""
    found = list(_slept)
    _slept.clear()
    return found


def sleep_of(schedule: Schedule) -> Costs:
    """What its actions sleep."""
    forward, inputs, weights = (each / schedule.chunks for each in (FORWARD, INPUTS, WEIGHTS))
    first: dict[tuple[Kind, int], float] = {("I", 0): 0.0, ("W", 0): inputs + weights}
    return Costs({**Costs.even(schedule.stages, forward, inputs, weights).seconds, **first})


def run_sleeping(names: Sequence[str], stages: Sequence[int], rounds: int, steps: int) -> list[dict[str, Any]]:
    """Measured and simulated bubbles of as many sleeping stages."""
    found = []
    for ranks, name in itertools.product(stages, (name for name in names if schedule_of(name).flushes)):
        microbatches = 2 * ranks
        schedule = schedule_of(name, ranks, microbatches)
        simulated = simulate(schedule, sleep_of(schedule)).bubble
        with ProcessGroup(sleeping, {"schedule": name, "microbatches": microbatches}, size=ranks, warm_up=1) as group:
            group.call(slept)
            for _ in range(rounds):
                group.turn(steps)
            by_rank = group.call(slept)
        bubbles, awake = [], []
        for step in zip(*by_rank, strict=True):
            seconds = sum(whole for _, whole in step)
            bubbles.append(1 - sum(busy for busy, _ in step) / seconds)
            awake.append(1 - ranks * microbatches * (FORWARD + INPUTS + WEIGHTS) / seconds)
        found.append(
            {
                "stages": ranks,
                "schedule": name,
                "microbatches": microbatches,
                "simulated": simulated,
                "measured": statistics.median(bubbles),
                "awake": statistics.median(awake),
                "all": bubbles,
            }
        )
        print(
            f"{ranks} stages, {name}: simulated {simulated:.1%}, measured {found[-1]['measured']:.1%}, awake "
            f"{found[-1]['awake']:.1%}",
            flush=True,
        )
    return found


def print_sleeping(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="share of the ranks' time spent waiting, stages that sleep", title_justify="left")
    for column in ("ranks", "microbatches", "schedule", "simulated", "measured", "not asleep"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["stages"]),
            str(row["microbatches"]),
            row["schedule"],
            *(f"{row[key]:.1%}" for key in ("simulated", "measured", "awake")),
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=harness.several(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--precision", type=harness.several(("fp32", "bf16")), default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sleeping", action="store_true")
    parser.add_argument("--stages", type=lambda text: [int(each) for each in text.split(",")], default=[4, 8])
    arguments = harness.parse(parser, "one round of one step", rounds=1)
    steps = 1 if arguments.quick else CASE.steps
    if arguments.sleeping:
        rows = run_sleeping(arguments.schedules, arguments.stages, arguments.rounds, steps)
        print_sleeping(rows)
        targets = [
            Target(
                f"{row['stages']} {row['schedule']}",
                f"{row['stages']} stages, {row['schedule']}: points of bubble beside the simulation",
                3.0,
                at_least=False,
            )
            for row in rows
        ]
        judged = judge(
            targets,
            {f"{row['stages']} {row['schedule']}": 100 * abs(row["measured"] - row["simulated"]) for row in rows},
        )
        name, found = "pp-sleeping", {"sets": rows, "targets": judged}
    else:
        results = [
            result
            for precision in arguments.precision
            for result in run_set(precision, arguments.schedules, arguments.rounds, steps)
        ]
        judged = judge(TARGETS, figures(results))
        name, found = "pp", {"sets": results, "targets": judged}
    print_targets(judged)
    print(f"record: {harness.write_record(name, vars(arguments), found)}")


if __name__ == "__main__":
    main()
