"""One row of the table: a model under a plan, beside the same model in a plain torch loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shoal import Plan
from shoal.comm.silent import SilentWorld
from shoal.data import Cursor, stack_samples
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.module.build import build
from shoal.parallel.tensor import Region, cut_among, cuts_of
from shoal.precision import cast_floating
from tests.parity.cases import gathered
from tests.pool import run_ranks
from tests.zoo.entry import Model
from tests.zoo.language import LANGUAGE
from tests.zoo.others import OTHERS
from tests.zoo.vision import VISION

ZOO: dict[str, Model] = LANGUAGE | VISION | OTHERS
PLANS: dict[str, dict[str, Any]] = {
    "dp 2": {"dp": 2},
    "zero 2, recompute": {"dp": 2, "zero": 2, "recompute": "full"},
    "zero 3, memory": {"dp": 2, "zero": 3, "memory": {}},
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
}
PLANS_OF_READY = {"tp 2": {"tp": 2}, "pp 2, dp 2": {"pp": 2, "dp": 2}}
GLOBAL_BATCH, MICROBATCH, STEPS = 8, 2, 3  # of 20 samples: the third step has 4
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)  # Adam would hide a gradient that is off by a factor
TOLERANCE = {"fp64": (1e-6, 1e-4), "fp32": (1e-5, 2e-3)}
"""Of losses, relative; of each weight's way from its start, relative to its longest. Many models have norms in fp32
inside."""


@dataclass(frozen=True)
class Run:
    """Losses of the steps, and where each weight that is trained began and ended."""

    losses: list[float]
    start: dict[str, Tensor]
    end: dict[str, Tensor]


def ready_one(name: str) -> nn.Module:
    """A module that has values, as of `from_pretrained`: it is not made on fake tensors."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ZOO[name].factory()


def _engine(world: Any, name: str, plan: dict[str, Any], ready: bool = False) -> Engine:
    entry = ZOO[name]
    return Engine(
        ready_one(name) if ready else entry.factory,
        entry.loss,
        SGD,
        Plan(**plan),
        global_batch=GLOBAL_BATCH,
        microbatch=MICROBATCH,
        precision=entry.dtype,
        world=world,
    )


def _weights(engine: Engine) -> dict[str, Tensor]:
    return gathered(engine, {name: value.detach() for name, value in engine.optimizer.parameters.items()})


def under(world: Any, name: str, plan: dict[str, Any], ready: bool = False) -> Run | str:
    """The model under the plan; what Shoal says where it refuses."""
    engine = None
    try:
        engine = _engine(world, name, plan, ready)
        start = _weights(engine)
        losses = [engine.step(batch).loss for batch in engine.batches(ZOO[name].samples(), steps=STEPS)]
        return Run(losses, start, _weights(engine))
    except UserError as refusal:
        return str(refusal)
    finally:
        if engine is not None:
            engine.close()


def plain(world: Any, name: str) -> Run:
    """A loop by hand, without Shoal, from the weights that Shoal gives the model."""
    entry = ZOO[name]
    engine = _engine(world, name, {})
    given = {each: value.detach().clone() for each, value in engine.module.state_dict().items()}
    engine.close()
    dtype = {"fp64": torch.float64, "fp32": torch.float32}[entry.dtype]
    torch.manual_seed(0)
    module = entry.factory().to(dtype).train()
    if hasattr(module, "config"):
        module.config.use_cache = False
    module.load_state_dict(given)
    trained = {each: value for each, value in module.named_parameters() if value.requires_grad}
    start = {each: value.detach().clone() for each, value in trained.items()}
    optimizer, samples, losses = SGD(trained.values()), entry.samples(), []
    cursor = Cursor(len(samples), GLOBAL_BATCH, 0)
    for step in range(STEPS):
        ids = cursor.ids(step).tolist()
        optimizer.zero_grad()
        totals, counts = [], []
        for first in range(0, len(ids), MICROBATCH):
            chosen = [samples[each] for each in ids[first : first + MICROBATCH]]
            total, count = entry.loss(module, cast_floating(stack_samples(chosen), dtype))
            total.backward()
            totals.append(total.detach())
            counts.append(int(count))
        for value in trained.values():
            if value.grad is not None:
                value.grad /= sum(counts)
        optimizer.step()
        losses.append(float(sum(totals) / sum(counts)))
    return Run(losses, start, {each: value.detach().clone() for each, value in trained.items()})


@cache
def reference(name: str) -> Run:
    return run_ranks(plain, 1, name)[0]


def outcome(name: str, column: str) -> str:
    """Gives `equal`, `refused: ...` or `WRONG: ...`, the same on every rank."""
    plan = PLANS[column]
    return _outcome(name, run_ranks(under, Plan(**{**plan, "memory": None}).size, name, plan), partial(reference, name))


def outcome_of_ready(name: str, column: str) -> str:
    """What `outcome` gives, of a ready module beside the same one on one rank."""
    plan = PLANS_OF_READY[column]
    runs = run_ranks(under, Plan(**plan).size, name, plan, True)
    return _outcome(name, runs, lambda: run_ranks(under, 1, name, {}, True)[0])


def _outcome(name: str, runs: list[Any], wanted: Callable[[], Run]) -> str:
    said = [each for each in runs if isinstance(each, str)]
    if said:
        alike = len(said) == len(runs) and len(set(said)) == 1
        return f"refused: {said[0]}" if alike else f"WRONG: ranks do not say the same: {runs}"
    return compare(runs[0], wanted(), *TOLERANCE[ZOO[name].dtype])


def share(name: str) -> str:
    """The share of a model's parameters of which each of two ranks along tp has a part."""
    built = build(ZOO[name].factory, 0)
    cuts = cuts_of(built.module, 2, None)
    sliced = cut_among(built, Region(SilentWorld(0, 2).group("tp", [0, 1]), None), cuts.rules, found=cuts.found)
    whole = sum(prod(layout.shape) for layout in sliced.layouts.values())
    cut = sum(prod(layout.shape) for layout in sliced.layouts.values() if not layout.alike)
    return f"{cut / whole:.0%}"


def compare(run: Run, wanted: Run, loss: float, movement: float) -> str:
    """Gives `equal`, or what is not."""
    for step, (ours, theirs) in enumerate(zip(run.losses, wanted.losses, strict=True)):
        if abs(ours - theirs) > loss * abs(theirs):
            return f"WRONG: the loss of step {step} is {ours}, by hand {theirs}"
    for name, end in wanted.end.items():
        far = (end - wanted.start[name]).abs().max()
        off = (run.end[name] - end).abs().max()
        if not off <= movement * far + loss * 1e-3:
            return f"WRONG: {name} is off by {float(off):.3g} after it moved by {float(far):.3g}"
    return "equal"
