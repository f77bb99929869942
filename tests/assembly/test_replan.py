"""A run that changes its plan while it runs equals one that was saved, stopped and loaded under the other plan."""

from __future__ import annotations

import os
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.replan import Watched
from shoal import Plan
from shoal.checkpoint.handover import PURPOSE
from shoal.checkpoint.manifest import read_manifest
from shoal.checkpoint.pieces import Want
from shoal.checkpoint.reader import load, tensor_shapes
from shoal.engine import Engine
from shoal.errors import CheckpointError, StorageError, UserError
from shoal.models import MLP
from shoal.parallel.layout import Box
from tests.parity.cases import CASES, engine, vectors
from tests.parity.covering import thinned
from tests.pool import run_ranks

BEFORE, AFTER = 3, 3


def plan_of(fields: dict[str, Any], directory: str) -> Plan:
    memory = fields.get("memory")
    if memory and memory.get("disk") == "a directory":
        fields = {**fields, "memory": {**memory, "disk": f"{directory}/disk"}}
    return Plan(**fields)


def _steps(running: Engine, data: Any, steps: int) -> list[float]:
    return [running.step(batch).loss for batch in running.batches(data, steps=steps)]


def _both(
    world,
    case: str,
    precision: str,
    old: dict[str, Any],
    new: dict[str, Any],
    directory: str,
    accumulation: int = 1,
    **more: Any,
) -> Any:
    """The losses after the change: of the run that goes on, and of one that is loaded."""
    data, made = CASES[case].data(), partial(engine, case, precision, accumulation, world=world, **more)
    running = made(plan=plan_of(old, directory))
    _steps(running, data, BEFORE)
    running.save(f"{directory}/between")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what an exchange has kept may not go on
        running.replan(plan_of(new, directory))
    assert running.plan == plan_of(new, directory) and running.step_index == BEFORE
    goes_on = _steps(running, data, AFTER)
    running.save(f"{directory}/goes-on")
    evaluated = running.evaluate(data).loss
    running.close()
    world.everyone.barrier()
    running = made(plan=plan_of(new, directory))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        running.load(f"{directory}/between")
    loaded = _steps(running, data, AFTER)
    running.save(f"{directory}/loaded")
    assert evaluated == running.evaluate(data).loss
    running.close()
    return goes_on, loaded


def contents(directory: Path, step: int = -1) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    path = sorted(directory.glob("step-*"))[-1] if step < 0 else directory / f"step-{step:08}"
    shapes = tensor_shapes(path)
    found = {name: torch.empty(shape, dtype=torch.float64) for name, shape in shapes.items()}
    load(path, [Want(name, shapes[name], Box.whole(shapes[name]), into) for name, into in found.items()])
    return found, dict(read_manifest(path).extra)


PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 4},
    "zero1": {"dp": 4, "zero": 1},
    "zero2": {"dp": 4, "zero": 2},
    "zero3": {"dp": 4, "zero": 3},
    "hybrid": {"dp": 4, "zero": 2, "shard": 2},
    "tp2": {"dp": 2, "tp": 2},
    "tp2-zero3": {"dp": 2, "tp": 2, "zero": 3},
    "cp2": {"dp": 2, "cp": 2, "zero": 1},
    "pp2": {"dp": 2, "pp": 2, "zero": 1},
    "pp2-tp2": {"pp": 2, "tp": 2},
    "pp4-zbv": {"pp": 4, "schedule": "zbv"},
    "2bw": {"dp": 2, "pp": 2, "schedule": "2bw"},
    "compiled": {"dp": 4, "zero": 1, "compile": "aot_eager"},
    "host": {"dp": 4, "zero": 3, "memory": {}},
    "deferred": {"dp": 4, "zero": 1, "memory": {"update": "deferred", "activations": 0.5}},
    "disk": {"dp": 4, "zero": 3, "memory": {"disk": "a directory"}},
    "recompute": {"dp": 4, "zero": 3, "recompute": "full"},
    "blocks": {"dp": 2, "pp": 2, "zero": 1, "recompute": {"name": "blocks", "full": 3, "selective": "5-6"}},
    "shares": {"dp": 4, "zero": 1, "shares": [1, 4, 2, 2]},
    "topk": {"dp": 4, "exchange": {"name": "topk", "ratio": 0.1}},
    "local": {"dp": 4, "exchange": {"name": "local_sgd", "every": 2}},
    "ep2": {"dp": 4, "ep": 2},
    "ep2-zero2": {"dp": 4, "ep": 2, "zero": 2},
}
TEXT = ["dp", "zero3", "tp2", "pp2", "hybrid", "pp2-tp2", "cp2", "host", "tp2-zero3", "pp4-zbv", "zero1", "disk"]
TEXT += ["dp", "2bw", "zero2", "deferred", "2bw", "disk", "disk", "recompute", "topk", "topk", "zero1", "local"]
TEXT += ["local", "pp2", "dp", "tp2-zero3", "zero3", "pp4-zbv", "host", "hybrid", "zero1", "blocks", "zero3", "blocks"]
TEXT += ["shares", "pp2", "shares", "dp"]
EXPERTS = ["dp", "ep2", "zero3", "ep2-zero2", "tp2", "ep2", "pp2", "ep2-zero2", "dp"]
STATISTICS = ["dp", "zero3", "pp2", "zero1"]
ROWS = [("gpt-deep", "bf16" if place % 3 == 2 else "fp32", *pair) for place, pair in enumerate(pairwise(TEXT))]
ROWS += [("moe-deep", "fp32", *pair) for pair in pairwise(EXPERTS)]
ROWS += [("resnet-batchnorm", "fp32", *pair) for pair in pairwise(STATISTICS)]
ROWS += [("llama-deep", "fp16", "dp", "pp2"), ("llama-deep", "fp16", "pp2", "zero3"), ("tied", "fp64", "tp2", "dp")]
ROWS += [("gpt", "fp32", "tp2", "compiled"), ("gpt", "fp32", "compiled", "zero3")]
ROWS += [("unused-frozen", "fp32", "zero3", "dp"), ("unused-frozen", "fp32", "zero1", "zero3")]


CHANGES = ["dp zero3", "zero3 tp2", "tp2 pp2", "hybrid pp2-tp2", "cp2 host", "pp4-zbv zero1", "disk disk", "2bw zero2"]
CHANGES += ["deferred 2bw", "topk topk", "local local"]
COVERING = [row for row in ROWS if f"{row[2]} {row[3]}" in CHANGES or row[0] in ("llama-deep", "unused-frozen", "gpt")]
COVERING += [row for row in ROWS if row[0] == "moe-deep"][::3] + [row for row in ROWS if row[0] == "resnet-batchnorm"][
    :2
]
"""At least one change to and from each mechanism; the others are for the matrix."""


@pytest.mark.parametrize(("case", "precision", "old", "new"), thinned(ROWS, COVERING))
def test_a_run_that_changes_its_plan_equals_one_that_is_loaded(tmp_path, case, precision, old, new):
    assert_same(run_ranks(_both, 4, case, precision, PLANS[old], PLANS[new], str(tmp_path)), tmp_path)


def assert_same(answers: list[Any], directory: Path) -> None:
    """The run that went on has the losses and the state of the one that was loaded."""
    for goes_on, loaded in answers:
        assert goes_on == pytest.approx(loaded, rel=0, abs=0, nan_ok=True)  # of a replica apart that got no sample
    (mine, about), (theirs, told) = contents(directory / "goes-on"), contents(directory / "loaded")
    assert mine.keys() == theirs.keys() and about == told
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


# the batches under way, and what is saved and recorded meanwhile


class Stream(torch.utils.data.IterableDataset):
    """Samples without an index, with a place that can be saved."""

    def __init__(self) -> None:
        self.samples, self.at = vectors(), 0

    def __iter__(self):
        while True:
            self.at += 1
            yield self.samples[(self.at - 1) % len(self.samples)]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def _under_way(world, streamed: bool, change: bool, directory: str) -> Any:
    """A loop over batches that goes on through changes of the plan, with a save that is still under way."""
    data = Stream() if streamed else vectors()
    running = engine("auxiliary", "fp64", 1, world=world, plan=Plan(dp=2))
    losses = []
    for batch in running.batches(data, steps=9):
        losses.append(running.step(batch).loss)
        if change and batch.step in (2, 5):
            running.save(directory, wait=False)
            running.replan(Plan(dp=2, zero=3) if batch.step == 2 else Plan(dp=2, zero=1))
    running.save(directory)
    placed = running.scheduler.last_epoch
    running.close()
    return losses, placed


@pytest.mark.parametrize("streamed", [False, True])
def test_a_loop_over_batches_goes_on(tmp_path, streamed):
    changed = run_ranks(_under_way, 2, streamed, True, str(tmp_path / "changed"))
    plain = run_ranks(_under_way, 2, streamed, False, str(tmp_path / "plain"))
    for (losses, place), (expected, expected_place) in zip(changed, plain, strict=True):
        assert losses == pytest.approx(expected, rel=1e-13) and place == expected_place == 9
    assert sorted(path.name for path in (tmp_path / "changed").iterdir()) == [
        f"step-0000000{step}" for step in (3, 6, 9)
    ]
    (mine, _), (theirs, _) = contents(tmp_path / "changed", 9), contents(tmp_path / "plain", 9)
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-11, atol=1e-13)


# refusals: the old plan goes on


class Kept:
    """A factory that gives one module again and again."""

    def __init__(self) -> None:
        self.module = nn.Linear(10, 3)

    def __call__(self) -> nn.Module:
        return self.module


def mse(model, mb):
    return (model(mb["inputs"]) - mb["targets"]).square().sum(), len(mb["inputs"])


def _refused(world, directory: str) -> list[str]:
    said = []

    def refusal(running, plan, kind: type[Exception] = UserError) -> None:
        with pytest.raises(kind) as error:
            running.replan(plan)
        said.append(str(error.value))

    sgd = partial(torch.optim.SGD, lr=0.1)
    for model in (nn.Linear(10, 3), Kept()):
        torch.manual_seed(0)
        running = Engine(model, mse, sgd, Plan(dp=2), global_batch=4, world=world)
        refusal(running, Plan(dp=2, zero=1))
        running.close()
    running = engine("auxiliary", "fp64", 1, world=world, plan=Plan(dp=2, zero=2))
    twin = engine("auxiliary", "fp64", 1, world=world, plan=Plan(dp=2, zero=2))
    _steps(running, vectors(), 2), _steps(twin, vectors(), 2)
    refusal(running, Plan(dp=4))
    refusal(running, Plan(dp=2, ep=2))  # it has no experts
    refusal(running, Plan(dp=2, exchange="no such"))
    refusal(running, {"zero": 3})
    disk = {"path": directory, "size": 1024 if world.rank == 1 else 2**30}  # rank 1 alone has no room
    opened = []
    for _ in range(2):
        refusal(running, Plan(dp=2, zero=3, memory={"disk": disk}), StorageError)
        opened.append(len(os.listdir("/proc/self/fd")))
    assert opened[0] == opened[1], "what a refused plan has opened is closed"
    for wrong in ([0, 2], [], [0, 0], 1, "01", None):
        with pytest.raises(UserError, match=r"a list of numbers of ranks from 0 to 1"):
            world.among(wrong)
    assert _steps(running, vectors(), 3) == _steps(twin, vectors(), 3), "a refusal changes nothing"
    running.replan(Plan(dp=2, zero=3, memory={"disk": directory}))
    assert _steps(running, vectors(), 1) == pytest.approx(_steps(twin, vectors(), 1))
    running.close(), twin.close()
    return said


def test_what_is_refused_leaves_the_old_plan_going(tmp_path):
    said = run_ranks(_refused, 2, str(tmp_path))
    assert said[0] == said[1]
    ready, same, size, stages, exchange, table, disk, _ = said[0]
    assert "Plan(zero=3)" in table and "plan.memory.disk.size" in disk
    assert "give Engine a factory" in ready and "make a model each time" in same
    assert "4" in size and "experts" in stages and "no such" in exchange


# fewer ranks


def _fewer(world, new: dict[str, Any], staying: list[int], directory: str) -> Any:
    """Trains on all ranks, goes on with some of them; beside a run that is loaded by as many."""
    data = CASES["gpt-deep"].data()
    running = engine("gpt-deep", "fp32", 1, world=world, plan=Plan(dp=2, tp=2, zero=1))
    _steps(running, data, 2)
    running.save(f"{directory}/between")
    fewer = world.among(staying)
    if fewer is None:
        running.leave()
        return None
    running.replan(Plan(**new), world=fewer)
    assert running.world.size == len(staying) and running.world.rank == staying.index(world.rank)
    losses = _steps(running, data, 2)
    running.save(f"{directory}/goes-on")
    running.close()
    loaded = engine("gpt-deep", "fp32", 1, world=fewer, plan=Plan(**new))
    loaded.load(f"{directory}/between")
    assert _steps(loaded, data, 2) == losses
    loaded.save(f"{directory}/loaded")
    loaded.close()
    return losses


@pytest.mark.parametrize(
    ("new", "staying"), [({"dp": 2, "zero": 3}, [0, 1]), ({"pp": 2}, [1, 2]), ({"dp": 3}, [3, 1, 0]), ({}, [2])]
)
def test_ranks_may_leave(tmp_path, new, staying):
    answers = run_ranks(_fewer, 4, new, staying, str(tmp_path))
    assert [rank for rank, answer in enumerate(answers) if answer is not None] == sorted(staying)
    (mine, _), (theirs, _) = contents(tmp_path / "goes-on"), contents(tmp_path / "loaded")
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


def _refused_for_fewer(world) -> Any:
    running = engine("auxiliary", "fp64", 1, world=world, plan=Plan(dp=2))
    _steps(running, vectors(), 1)
    fewer = world.among([0])
    with pytest.raises(UserError if fewer else CheckpointError) as error:
        running.leave() if fewer is None else running.replan(Plan(dp=3), world=fewer)
    losses = _steps(running, vectors(), 1)
    running.close()
    if fewer is not None:
        alone = engine("auxiliary", "fp64", 1, world=fewer, plan=Plan())
        with pytest.raises(UserError, match="2 ranks are to go on, and 1 train"):
            alone.replan(Plan(dp=2), world=world)
        alone.close()
    return str(error.value), losses


def test_a_plan_that_is_refused_is_told_to_who_leaves():
    (said, losses), (told, same) = run_ranks(_refused_for_fewer, 2)
    assert said == told and "plan" in said and losses == same


# what is moved


def _moved(world, old: dict[str, Any], new: dict[str, Any]) -> tuple[int, int]:
    """Bytes that this rank sends, and those that it lacks, element by element."""
    running = engine("gpt-deep", "fp32", 1, world=world, plan=Plan(**old))
    _steps(running, CASES["gpt-deep"].data(), 1)
    with Watched() as watched:
        running.replan(Plan(**new))
    running.close()
    return running.ledger.total(purpose=PURPOSE).wire, watched.lacking()[0]


@pytest.mark.parametrize(
    ("old", "new", "nothing"),
    [
        ("dp", "zero3", True),
        ("dp", "pp4-zbv", True),
        ("hybrid", "zero1", False),
        ("zero3", "tp2", False),
        ("pp2-tp2", "dp", False),
    ],
)
def test_no_rank_gets_what_it_has(old, new, nothing):
    found = run_ranks(_moved, 4, PLANS[old], PLANS[new])
    sent, lacking = (sum(each) for each in zip(*found, strict=True))
    boxes = 16 * 4 * 3 * 200  # each box of a parcel begins at a multiple of 16 bytes
    assert lacking <= sent <= lacking + boxes and (lacking == 0) == nothing and (sent == 0) == nothing


# what else there is of an engine while its plan changes


def _beside(world) -> None:
    """A loop, hooks, another engine, and changes one after the other."""
    data = vectors()
    adam = partial(torch.optim.Adam, lr=0.01)
    made = partial(Engine, partial(MLP, (10, 16, 3), "tanh"), mse, adam, global_batch=8, precision="fp64", world=world)
    running, twin = (made(plan=Plan(dp=2)) for _ in range(2))
    loop, other = running.loop(1), twin.loop(1)
    for each in (loop, other):
        each.backward(each(data[0]["inputs"][None]).square().mean())
    with pytest.raises(UserError, match="after step"):
        running.replan(Plan(dp=2, zero=1))
    loop.step(), other.step()
    seen = []
    handle = next(iter(running.parameters.values())).register_hook(seen.append)
    with pytest.raises(UserError, match="has a hook that was registered after"):
        running.replan(Plan(dp=2, zero=1))
    handle.remove()
    for plan in (Plan(dp=2, zero=1), Plan(dp=2, zero=3), Plan(dp=2), Plan(dp=2, recompute="none", zero=2)):
        running.replan(plan)
        mine, other = _steps(running, data, 1), _steps(twin, data, 1)
        assert mine == pytest.approx(other, rel=1e-12)
    with pytest.raises(UserError, match="since this loop was made"):
        loop(data[0]["inputs"][None])
    assert running.evaluate(data).loss == pytest.approx(twin.evaluate(data).loss, rel=1e-12)
    running.close(), twin.close()


def test_loops_hooks_and_other_engines():
    run_ranks(_beside, 2)


def _on_a_disk(directory: str) -> list[float]:
    """A run that goes to the disk, and changes there; the losses after it is found again as a killed one would be."""
    data, disks = (
        CASES["gpt"].data(),
        [{"disk": f"{directory}/a"}, {"disk": f"{directory}/a"}, {"disk": f"{directory}/b"}],
    )
    running = engine("gpt", "fp32", 1, plan=Plan())
    _steps(running, data, 1)
    for number, memory in enumerate(disks):
        running.replan(Plan(memory=memory, recompute="full" if number == 1 else "none"))
        _steps(running, data, 1)
    running.optimizer.settle()
    running.close()
    found = engine("gpt", "fp32", 1, plan=Plan(memory=disks[-1]))
    assert found.recover() and found.step_index == 4
    losses = _steps(found, data, 2)
    found.close()
    assert not list(Path(directory).glob("*/*.aside")), "what was replaced is gone"
    return losses


def test_what_lies_on_a_disk_changes_there_and_is_found_again(tmp_path):
    plain = engine("gpt", "fp32", 1, plan=Plan())
    losses = _steps(plain, CASES["gpt"].data(), 6)
    plain.close()
    assert _on_a_disk(str(tmp_path)) == pytest.approx(losses[4:], rel=1e-6)


def _streamed_by_fewer(world) -> Any:
    data = Stream()
    running = engine("auxiliary", "fp64", 1, world=world, plan=Plan(dp=2))
    batches = running.batches(data)
    losses = [running.step(next(batches)).loss for _ in range(2)]
    fewer = world.among([1])
    if fewer is None:
        running.leave()
        return losses, data.at
    data.load_state_dict({"at": 0})  # rank 0 has read, this one not yet
    running.replan(Plan(), world=fewer)
    with pytest.raises(UserError, match="since these batches began"):
        next(batches)
    losses += [running.step(batch).loss for batch in running.batches(data, steps=2)]
    running.close()
    return losses, data.at


def _streamed(world) -> list[float]:
    running = engine("auxiliary", "fp64", 1, world=world)
    losses = [running.step(batch).loss for batch in running.batches(Stream(), steps=4)]
    running.close()
    return losses


def test_an_iterable_goes_on_where_it_was_on_another_rank():
    (first, _), (second, at) = run_ranks(_streamed_by_fewer, 2)
    assert second == pytest.approx(run_ranks(_streamed, 1)[0], rel=1e-12) and first == second[:2]
    assert at == 4 * 12
