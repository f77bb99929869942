"""Ranks that are left after one was killed go on in memory, as one process would have trained that was never disturbed;
others join them."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shoal import Plan
from shoal.assembly import replan
from shoal.assembly.rebuild import Rebuild
from shoal.checkpoint.buddy import ring as to_buddies
from shoal.checkpoint.buddy.ring import Ring
from shoal.comm.world import Seat, World
from shoal.engine import Engine
from shoal.errors import CheckpointError, LaunchError, UserError
from shoal.models import regression
from shoal.optim.optimizer import ChunkOptimizer
from shoal.training.ballot import Ballot
from shoal.training.commit import Commit
from shoal.training.reduce import Reduce
from tests.assembly.test_replan import plan_of
from tests.module.test_buffers import ADAMW, Writes, bound_anew, lerp
from tests.parity.cases import CASES, engine, vectors
from tests.pool import disposable_ranks, reference, run_ranks

STEPS, FAILS = 5, 2
SOON = 60.0  # seconds, with much to spare on busy cores
WRITES = {"lerp": lerp, "bound anew": bound_anew}
WHERE = {  # what a rank comes to in the step that fails, and whether it goes before or after it
    "backward": (Reduce, "backward", False),
    "before the ballot": (Ballot, "cast", False),
    "after the ballot": (Ballot, "cast", True),
    "in its update": (ChunkOptimizer, "apply", True),
    "after its update": (Commit, "apply", True),
    "once it is counted": (Rebuild, "after_step", False),
    "while it goes on": (replan, "session", False),
    "on its way to a buddy": (Ring, "carry", False),
    "as it writes for its buddy": (to_buddies, "write", True),
}


def again(world: World, rank: int, size: int, name: str = "again") -> World:
    """A world of the next generation with the store of `world`."""
    given = {"seat": Seat(rank, size), "generation": world.generation + 1, "device": "cpu"}
    return World(rank, size, store=dist.PrefixStore(name, world._given), timeout=world.timeout, **given)


def at(where: str, what: Callable[[], None], when: Callable[[], bool]) -> Any:
    """Has `what()` called at the first call of a function, before or after it, that comes `when()`."""
    of, name, after = WHERE[where]
    plain, done = getattr(of, name), [False]

    def call(*args: Any, **more: Any) -> Any:
        if now := when() and not done[0]:
            done[0] = True
        if now and not after:
            what()
        result = plain(*args, **more)
        if now and after:
            what()
        return result

    return patch.object(of, name, call)


def buddies_on(hosts: str) -> Any:
    """Has ranks look for their buddies as if each were on the host of its letter."""
    plain = Ring.__init__
    return patch.object(Ring, "__init__", lambda ring, group, _: plain(ring, group, hosts[group.rank]))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise LaunchError("as if another rank had gone")


def weights(running: Engine) -> dict[str, torch.Tensor]:
    with running.whole_weights():
        return {name: value.detach().clone() for name, value in running.model.state_dict().items()}


@dataclass(frozen=True)
class Row:
    """A run on the ranks of plan `old`, of which those of `dead` are killed somewhere in step FAILS, and that goes on
    under plan `new`; `joins`: further ranks then; `fails`: ranks that live and raise themselves, and where; `hosts`:
    see `buddies_on`."""

    name: str
    old: dict[str, Any]
    new: dict[str, Any]
    dead: dict[int, str]
    case: str = "gpt"
    precision: str = "fp32"
    joins: int = 0
    fails: dict[int, str] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    hosts: str = ""

    @property
    def size(self) -> int:
        return Plan(**self.old).size

    @property
    def data(self) -> list[dict[str, torch.Tensor]]:
        return vectors() if self.case in WRITES else CASES[self.case].data()

    def engine(self, world: World, plan: Plan, **more: Any) -> Engine:
        if self.case in WRITES:
            made = partial(Engine, partial(Writes, WRITES[self.case]), regression, ADAMW, global_batch=12, microbatch=3)
        else:
            made = partial(engine, self.case, self.precision, 1)
        return made(world=world, plan=plan, **self.more, **more)


def _whole(world: World, row: Row) -> Any:
    running = row.engine(world, Plan())
    losses = [running.step(batch).loss for batch in running.batches(row.data, steps=STEPS)]
    return losses, weights(running)


def _trains(world: World, row: Row, disk: str) -> Any:
    """The losses by step on a rank that is left, or comes, and the weights at the end if it has all of them."""
    data, losses = row.data, dict[int, float]()
    old, new = (plan_of(fields, disk) for fields in (row.old, row.new))
    left = [rank for rank in range(row.size + row.joins) if rank not in row.dead]
    if world.rank >= row.size:
        running = row.engine(again(world, left.index(world.rank), len(left)), new, joins=True)
    else:
        running = row.engine(World(world.rank, row.size, seat=Seat(world.rank, row.size), store=world._given), old)
        with ExitStack() as stack:
            if row.hosts:
                stack.enter_context(buddies_on(row.hosts))
            for ranks, what in ((row.dead, die), (row.fails, fail)):
                if (where := ranks.get(world.rank)) is not None:
                    stack.enter_context(at(where, what, lambda: running.step_index == FAILS))
            with pytest.raises(LaunchError):
                for batch in running.batches(data, steps=STEPS):
                    losses[batch.step] = running.step(batch).loss
            if "while it goes on" in row.dead.values():
                alive = [rank for rank in range(row.size) if row.dead.get(rank) in (None, "while it goes on")]
                with pytest.raises(LaunchError):
                    running.regroup(Plan(dp=len(alive)), again(world, alive.index(world.rank), len(alive), "first"))
            joined = again(world, left.index(world.rank), len(left)) if row.joins else None
            if (made := running.regroup(new, joined or running.world.without(list(row.dead)))) is not None:
                losses[made.step] = made.loss
    assert FAILS <= running.step_index <= FAILS + 1
    for batch in running.batches(data, steps=STEPS - running.step_index):
        losses[batch.step] = running.step(batch).loss
    running.verify()  # all replicas hold the same again
    found = weights(running) if new.tp == 1 else {}
    running.close()
    return losses, found


def _on_disk(ranks: int) -> dict[str, Any]:
    return {"dp": ranks, "memory": {"host": "1GiB", "disk": "a directory"}}


def _later(ranks: int) -> dict[str, Any]:
    return {"dp": ranks, "memory": {"host": "1GiB", "update": "deferred"}}


_ROWS = [
    Row("its backward", {"dp": 3}, {"dp": 2}, {1: "backward"}),
    Row("the first rank", {"dp": 3}, {"dp": 2}, {0: "before the ballot"}),
    Row("all others have updated", {"dp": 3}, {"dp": 2}, {2: "after the ballot"}),
    Row("updates its own", {"dp": 3}, {"dp": 2, "zero": 3}, {1: "after its update"}, precision="bf16"),
    Row("one is behind", {"dp": 3}, {"dp": 2}, {1: "after its update"}, fails={2: "after the ballot"}),
    Row("all have counted it", {"dp": 2}, {"dp": 1}, {1: "once it is counted"}, fails={0: "once it is counted"}),
    Row("one is in its update", {"dp": 3}, {"dp": 2}, {1: "after its update"}, fails={0: "in its update"}),
    Row("parts of layers", {"dp": 2, "tp": 2}, {"dp": 3}, {3: "before the ballot"}),
    Row("parts afterwards", {"dp": 3}, {"tp": 2}, {1: "before the ballot"}, case="llama"),
    Row("stages", {"dp": 2, "pp": 2}, {"dp": 3}, {0: "before the ballot"}),
    Row("shared rows", {"dp": 2, "cp": 2}, {"dp": 3}, {3: "backward"}),
    Row("experts", {"dp": 4, "ep": 2}, {"dp": 3}, {0: "backward"}, case="moe"),
    Row("copies of shards", {"dp": 4, "shard": 2, "zero": 3}, {"dp": 3, "zero": 1}, {1: "backward"}),
    Row("weights were to come", {"dp": 4, "shard": 2, "zero": 1}, {"dp": 3}, {1: "after its update"}),
    Row("shared memory was to come", {"dp": 4, "shard": 2, "zero": 3}, {"dp": 3}, {0: "after the ballot"}),
    Row("another joins", {"dp": 2}, {"dp": 2}, {0: "backward"}, joins=1),
    Row("two are gone", {"dp": 4}, {"dp": 2}, {0: "backward", 3: "before the ballot"}),
    Row("a second one later", {"dp": 4}, {"dp": 2}, {3: "backward", 1: "while it goes on"}),
    Row("statistics", {"dp": 3}, {"dp": 2}, {1: "before the ballot"}, case="resnet-batchnorm"),
    Row("fp16", {"dp": 3}, {"dp": 2}, {1: "before the ballot"}, precision="fp16"),
    Row("on the host", {"dp": 3, "memory": {"host": "1GiB"}}, {"dp": 2}, {1: "backward"}),
    Row("on the disk", _on_disk(3), _on_disk(2), {0: "backward"}),
    Row("updates made later", _later(3), _later(2), {2: "backward"}),
    Row("buffers written in place", {"dp": 3}, {"dp": 2}, {1: "before the ballot"}, case="lerp"),
    Row("buffers bound anew", {"dp": 3}, {"dp": 2}, {1: "before the ballot"}, case="bound anew"),
    Row("dropout", {"dp": 3}, {"dp": 2}, {1: "backward"}, case="gpt-rotary-dropout"),
    Row("compiled", {"dp": 2, "compile": "aot_eager"}, {"dp": 1, "compile": "aot_eager"}, {1: "backward"}),
    Row("half wire", {"dp": 3, "exchange": "fp16"}, {"dp": 2}, {1: "backward"}),
]
ROWS = {row.name: row for row in _ROWS}


SUITE = ["its backward", "all have counted it", "one is behind", "one is in its update", "parts of layers", "stages"]
SUITE += ["copies of shards", "another joins", "a second one later", "statistics", "a part is gone", "residuals"]


def shown(names: Iterable[str]) -> list[Any]:
    """The names, of which those beyond SUITE are left to the matrix."""
    return [name if name in SUITE else pytest.param(name, marks=pytest.mark.matrix) for name in names]


@pytest.mark.parametrize("row", shown(ROWS))
def test_a_killed_rank_costs_nothing(row, tmp_path):
    row = ROWS[row]
    expected, whole = reference(_whole, 1, replace(row, name="", old={}, new={}, dead={}, fails={}, joins=0))[0]
    with disposable_ranks(_trains, row.size + row.joins, row, str(tmp_path)) as ranks:
        answers = [rank.result(timeout=SOON) for number, rank in enumerate(ranks) if number not in row.dead]
    tolerance = 2e-5 if row.precision == "fp32" and "exchange" not in row.old else 2e-2
    for losses, found in answers:
        for step, loss in losses.items():
            assert loss == pytest.approx(expected[step], rel=tolerance), step
        for name, value in found.items():
            torch.testing.assert_close(value, whole[name], rtol=tolerance * 10, atol=tolerance)
    assert set().union(*(losses for losses, _ in answers)) >= set(range(STEPS))


class Endless(torch.utils.data.IterableDataset[Any]):
    """Samples over and over."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return itertools.cycle(self.samples)


NOT_ENOUGH = {
    "a part is gone": ({"dp": 3, "zero": 3}, False, "the run does not hold"),
    "a stage is gone": ({"pp": 2}, False, "the run does not hold"),
    "residuals": ({"dp": 3, "exchange": {"name": "topk", "ratio": 0.5}}, False, "each rank has state of its own"),
    "replicas apart": ({"dp": 3, "exchange": "decentralized"}, False, "each rank has state of its own"),
    "without a flush": ({"pp": 2, "schedule": "2bw"}, False, "updates are always under way"),
    "an iterable": ({"dp": 3}, True, "an iterable dataset"),
}


def _goes_on_from_a_checkpoint(world: World, name: str, directory: str) -> tuple[str, list[float]]:
    """What is said where the last rank is no more, and the losses of what it says to do instead."""
    fields, iterable, _ = NOT_ENOUGH[name]
    row, size, losses = Row("", fields, {}, {}), Plan(**fields).size, list[float]()
    running = row.engine(world, Plan(**fields))
    batches = running.batches(Endless(row.data) if iterable else row.data)
    losses += [running.step(next(batches)).loss for _ in range(FAILS)]
    running.save(directory)
    losses.append(running.step(next(batches)).loss)
    if world.rank == size - 1:
        return "", []
    rest = again(world, world.rank, size - 1)
    with pytest.raises(CheckpointError) as error:
        running.regroup(Plan(dp=size - 1), rest)
    anew = row.engine(again(world, world.rank, size - 1, "anew"), Plan(dp=size - 1))
    anew.load(directory)
    losses[FAILS:] = [anew.step(batch).loss for batch in anew.batches(row.data, steps=STEPS - FAILS)]
    return str(error.value), losses


@pytest.mark.parametrize("name", shown(NOT_ENOUGH))
def test_what_is_not_enough_is_said_and_its_remedy_helps(name, tmp_path):
    fields, _, said = NOT_ENOUGH[name]
    size = Plan(**fields).size
    found = run_ranks(_goes_on_from_a_checkpoint, size, name, str(tmp_path))
    told = {(message, *losses[FAILS:]) for message, losses in found[:-1]}
    assert len(told) == 1, "all ranks say the same, and go on alike"
    message, losses = found[0]
    assert said in message and "Go on from a checkpoint" in message
    assert len(losses) == STEPS


def _refused_then_another(world: World) -> tuple[str, list[float]]:
    """A plan that does not fit is refused, and the run goes on under one that does."""
    row = ROWS["its backward"]
    running = row.engine(world, Plan(dp=3))
    batches = running.batches(row.data)
    losses = [running.step(next(batches)).loss for _ in range(FAILS)]
    if world.rank == 2:
        world.close()
        return "", losses
    with pytest.raises(LaunchError):
        running.step(next(batches))
    left = world.without([2])
    with pytest.raises(UserError) as error:
        running.regroup(Plan(dp=3), left)
    running.regroup(Plan(tp=2), left)
    losses += [running.step(batch).loss for batch in running.batches(row.data, steps=STEPS - FAILS)]
    return str(error.value), losses


def test_a_plan_that_is_refused_may_be_another():
    expected, _ = reference(_whole, 1, replace(ROWS["its backward"], name="", old={}, new={}, dead={}))[0]
    for said, losses in run_ranks(_refused_then_another, 3)[:2]:
        assert "3" in said and losses == pytest.approx(expected, rel=2e-5)


def _another_microbatch(world: World, alike: bool) -> tuple[str, list[float]]:
    """A third rank joins two, and microbatches are smaller from then on, unless it was told something else."""
    row, said = ROWS["its backward"], ""
    three = again(world, world.rank, 3)
    if world.rank == 2:
        with nullcontext() if alike else pytest.raises(UserError):
            running = row.engine(three, Plan(dp=3), microbatch=2 if alike else 3, joins=True)
            return said, [running.step(batch).loss for batch in running.batches(row.data, steps=STEPS - FAILS)]
        return said, []
    two = World(world.rank, 2, seat=Seat(world.rank, 2), store=world._given)
    running = row.engine(two, Plan(dp=2), microbatch=6)
    losses = [running.step(batch).loss for batch in running.batches(row.data, steps=FAILS)]
    try:
        running.regroup(Plan(dp=3), three, microbatch=2)
    except UserError as error:
        said = str(error)
        running.regroup(Plan(dp=2), again(world, world.rank, 2, "two"))
    assert running.microbatch == (2 if alike else 6)
    losses += [running.step(batch).loss for batch in running.batches(row.data, steps=STEPS - FAILS)]
    return said, losses


@pytest.mark.parametrize("alike", [True, False])
def test_ranks_that_join_bring_a_microbatch_that_all_of_them_have(alike):
    expected, _ = reference(_whole, 1, replace(ROWS["its backward"], name="", old={}, new={}, dead={}))[0]
    *others, (_, joined) = run_ranks(_another_microbatch, 3, alike)
    for said, losses in others:
        assert losses == pytest.approx(expected, rel=2e-5)
        assert said == ("" if alike else "microbatch = 2 on rank 0 and 3 on rank 2: give all ranks the same")
    assert joined == pytest.approx(expected[FAILS:] if alike else [], rel=2e-5)


def _wrong(world: World) -> list[str]:
    running = ROWS["its backward"].engine(world, Plan(dp=2))
    said = []
    for plan, other in ((Plan(dp=2), world), (Plan(dp=2), None), ({"dp": 2}, world.without([1 - world.rank]))):
        with pytest.raises(UserError) as error:
            running.regroup(plan, other)
        said.append(str(error.value))
    running.step(next(running.batches(ROWS["its backward"].data)))
    return said


def test_wrong_arguments_are_refused_and_change_nothing():
    for same, none, plan in run_ranks(_wrong, 2):
        assert "engine.world.without" in same and same == none
        assert "write plan=shoal.Plan(dp=2)" in plan


def refused(world: World, kept: bool) -> list[str]:
    """What ranks are told where two cannot build their model anew, and a third joins."""
    torch.manual_seed(0)
    ready = torch.nn.Linear(10, 3)
    make = partial(Engine, loss=regression, optimizer=ADAMW, global_batch=4)
    new, running = again(world, world.rank, 3, "three"), None
    if world.rank < 2:
        running = make((lambda: ready) if kept else ready, plan=Plan(dp=2), world=again(world, world.rank, 2, "two"))
    said = [] if running is None or kept else [running.why_not_regroup()]
    with pytest.raises(UserError) as told:
        if running is None:
            make(ready, plan=Plan(dp=3), world=new, joins=True)
        else:
            running.regroup(Plan(dp=3), new)
    return [*said, str(told.value)]


@pytest.mark.parametrize(
    ("kept", "message"), [(False, "was given a ready one"), (True, "modules that are in training")]
)
def test_a_rank_that_joins_is_told_where_the_others_cannot_build_their_model_anew(kept, message):
    """They refused before they built, and the rank that joined waited for them there."""
    assert all(message in each for said in run_ranks(refused, 3, kept, timeout=SOON) for each in said)
