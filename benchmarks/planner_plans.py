"""What `planner_ranking` runs: three tiny models, the plans that the planner's own space has for them on a few ranks,
and the ranks that run one after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.processes import Step
from shoal import Engine, Plan
from shoal.comm import Group, Reaches, World, measure_reaches
from shoal.comm.emulate import Throttled
from shoal.comm.world import Seat
from shoal.errors import UserError
from shoal.launch import join
from shoal.models import build
from shoal.planner import Subject
from shoal.planner.ask import legal_degrees, numbers_of
from shoal.planner.cluster import Cluster
from shoal.planner.degrees import ways
from shoal.planner.probe import Ran, probe, run_together
from shoal.planner.profile import Profile, profile
from shoal.planner.search import Search
from shoal.planner.task import Estimate, Task
from shoal.precision import precision

RANKS, SEQUENCE, SIDE = 4, 64, 16
SETTLE = 8
"""Untimed steps at the start of a turn, beside the first."""
ADAMW = partial(torch.optim.AdamW, lr=3e-4, fused=True)


@dataclass(frozen=True)
class Tiny:
    """A model as a job file has it, rows of its global batch, fields of the plan that are given, and microbatches that
    are tried; () where the model's statistics fix them at one row of each."""

    table: dict[str, Any]
    rows: int
    pins: dict[str, Any]
    microbatches: tuple[int, ...]


MIXTRAL = {"model_type": "mixtral", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256,
           "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4,
           "num_experts_per_tok": 2}  # fmt: skip
MODELS = {
    "gpt": Tiny(
        {"name": "gpt", "layers": 4, "d_model": 256, "heads": 4, "vocab_size": 512, "sequence": SEQUENCE},
        32,
        {},
        (2, 8),
    ),
    "mixtral": Tiny({"name": "hf", "config": MIXTRAL, "num_hidden_layers": 4}, 16, {"cp": 1}, (2, 4)),
    "resnet": Tiny({"name": "resnet", "depth": 20, "classes": 10}, 32, {}, (8,)),
}
LINKS = {"here": 0.0, "slow": 2e9}
"""Bits a second of the link of each rank in each direction; 0: as fast as it is."""
LATENCY = 2e-4
"""Seconds of a message over a slow link."""


class Slow(World):
    """A world all of whose groups stand behind links of `bits` a second."""

    bits = 0.0

    def group(self, name: str, ranks: list[int]) -> Group:
        group = super().group(name, ranks)
        if self.bits and len(ranks) > 1 and not isinstance(group.transports["cpu"], Throttled):
            group.transports = {
                kind: Throttled(transport, self.bits, LATENCY) for kind, transport in group.transports.items()
            }
        return group


def samples(name: str) -> list[dict[str, Tensor]]:
    """Four global batches, the same on every rank."""
    draw, tiny = torch.Generator().manual_seed(0), MODELS[name]
    if tiny.table["name"] == "resnet":
        images = torch.randn(4 * tiny.rows, 3, SIDE, SIDE, generator=draw)
        return [{"inputs": each, "labels": torch.tensor(place % 10)} for place, each in enumerate(images)]
    tokens = torch.randint(0, 512, (4 * tiny.rows, SEQUENCE + 1), generator=draw)
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]


_world: Slow | None = None
_models: dict[str, Any] = {}


def standing(bits: float) -> Step:
    """A rank that waits for plans to run, behind a link of so many bits a second."""
    global _world
    plain = join()
    _world = Slow(plain.rank, plain.size, seat=Seat(plain.local_rank, plain.local_size), store=plain.store)
    _world.bits = bits
    return lambda: None


def reaches() -> Reaches:
    """What groups of these ranks reach, as `plan = "auto"` measures it."""
    assert _world is not None
    return measure_reaches(_world)


def ran(name: str) -> tuple[Ran, ...]:
    """What the model takes where all ranks run it at once, as `plan = "auto"` measures it."""
    assert _world is not None
    return run_together(_world, subject_of(name), MODELS[name].rows, _fixed(name))


def run(name: str, plan: dict[str, Any], microbatch: int, steps: int, settle: int = SETTLE) -> list[float] | str:
    """Trains for some steps under a plan; milliseconds of each but the first and `settle` more, from the end of the one
    before to its own, as a job runs them; or why the engine refuses it.

    Those whose number is a power of two are left out: an engine looks at what forwards of such a number write
    (training/intact, module/buffers), and steps here have a power of two of them. That takes a third of a Mixtral's
    step, which a job of many steps next to never has, and the few steps of a turn twice or more.
    """
    try:
        return _run(name, plan, microbatch, steps, settle)
    except UserError as error:
        return str(error)


def _run(name: str, plan: dict[str, Any], microbatch: int, steps: int, settle: int) -> list[float]:
    assert _world is not None
    if name not in _models:
        _models[name] = build(MODELS[name].table), samples(name)
    model, data = _models[name]
    rows = MODELS[name].rows
    engine = Engine(
        model.factory, model.loss, ADAMW, Plan.from_dict(plan), global_batch=rows, microbatch=microbatch, world=_world
    )
    ends = []
    for batch in engine.batches(data, steps=steps + settle + 1):
        engine.step(batch)
        ends.append(time.perf_counter())
    engine.settle()
    engine.close()
    taken = {number: 1e3 * (end - began) for number, (began, end) in enumerate(pairwise(ends), 2)}
    return [each for number, each in taken.items() if number > settle + 1 and number & (number - 1)]


def subject_of(name: str) -> Subject:
    """A model as the planner is asked of it."""
    model = build(MODELS[name].table)
    return Subject(model.factory, model.loss, samples(name)[0], 1, precision("fp32"), Plan())


def _fixed(name: str) -> int | None:
    """The microbatch, where there is one only."""
    rows = MODELS[name].microbatches
    return rows[0] if len(rows) == 1 else None


def task_of(name: str, cluster: Cluster, together: Sequence[Ran] = ()) -> Task:
    """What the planner is asked of a model. `together`: what `ran` returned."""
    tiny, subject, traced = MODELS[name], subject_of(name), _traced(name)
    legal = legal_degrees(build(tiny.table).values, traced, SEQUENCE, cluster.per_host)
    numbers = numbers_of(subject.precision, ADAMW)
    task = Task(traced, cluster, tiny.rows, numbers, _fixed(name), None, tiny.pins, legal)
    return probe(subject, task, together=together)


@cache
def _traced(name: str) -> Profile:
    return profile(subject_of(name), ways(MODELS[name].pins, RANKS))


def every(name: str, task: Task) -> Iterator[Estimate]:
    """All plans of the planner's space with these microbatches, with what is predicted of each."""
    kept = MODELS[name].microbatches
    for recompute in task.recompute:  # all blocks alike
        asked = Search(replace(task, recompute=(recompute,)))
        for spread in asked.spreads():
            for choice in asked.choices(spread):
                if choice.microbatch in kept:
                    yield asked.simulated(asked.estimate(choice))
