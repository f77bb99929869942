"""Objects of the caller's join a run: they are saved, loaded, undone with a step, and given to ranks that come."""

from __future__ import annotations

import errno
import warnings
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shoal import Plan, TrainingError, UserError, checkpoint
from shoal.checkpoint.handover import Handover
from shoal.comm.world import Seat, World
from shoal.data import Cursor
from shoal.engine import Engine
from shoal.errors import CheckpointError, LaunchError
from tests.assembly.test_regroup import again, at, die, fail
from tests.assembly.test_replan import plan_of
from tests.parity.cases import CASES, EVEN
from tests.pool import disposable_ranks, reference, run_ranks

STEPS, FAILS = 6, 3
GPT = CASES["gpt"]
DATA = GPT.data()[:EVEN]  # so that each rank has a microbatch in each step
GLOBAL_BATCH = 12


@dataclass
class Best:
    loss: float = float("inf")
    step: int = -1


class Seen:
    """Samples by the step in which they were seen."""

    def __init__(self) -> None:
        self.ids: dict[int, tuple[int, ...]] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"ids": self.ids}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ids = state["ids"]


@dataclass
class Own:
    """What a caller has: something of each kind, changed within steps (`began`) and between them."""

    seen: Seen = field(default_factory=Seen)
    best: Best = field(default_factory=Best)
    curve: torch.Tensor = field(default_factory=lambda: torch.zeros(2))
    began: dict[str, Any] = field(default_factory=lambda: {"steps": [], "forwards": torch.zeros(2, dtype=torch.int64)})
    engine: Engine | None = None
    batch: Any = None

    def loss(self, model: Any, microbatch: Any) -> Any:
        if self.engine is not None and torch.is_grad_enabled():
            steps, forwards = self.began["steps"], self.began["forwards"]
            if steps[-1:] != [self.engine.step_index]:
                steps.append(self.engine.step_index)
                forwards += torch.tensor([1, self.engine.step_index])
        total, count = GPT.loss(model, {name: each for name, each in microbatch.items() if name != "factor"})
        return total * microbatch.get("factor", torch.ones(1)).mean(), count

    def register(self, engine: Engine) -> None:
        self.engine = engine
        for name in ("seen", "best", "curve", "began"):
            assert engine.state(name, getattr(self, name)) is getattr(self, name)

    def after(self, batch: Any, loss: float) -> None:
        self.seen.ids[batch.step] = batch.ids
        self.curve += torch.tensor([1.0, loss])
        if loss < self.best.loss:
            self.best.loss, self.best.step = loss, batch.step

    @property
    def all(self) -> tuple[Any, ...]:
        return dict(self.seen.ids), asdict(self.best), self.curve.tolist(), *_plain(self.began)


def _plain(began: dict[str, Any]) -> tuple[Any, ...]:
    return list(began["steps"]), began["forwards"].tolist()


def made(world: World, plan: Plan, own: Own, **more: Any) -> Engine:
    options = {"global_batch": GLOBAL_BATCH, "microbatch": 3, **more}
    return Engine(GPT.factory, own.loss, GPT.optimizer, plan=plan, world=world, **options)


def train(engine: Engine, own: Own, until: int = STEPS) -> None:
    for batch in engine.batches(DATA, steps=until - engine.step_index):
        own.batch = batch
        own.after(batch, engine.step(batch).loss)


def _undisturbed(world: World, until: int = STEPS, **more: Any) -> tuple[Any, ...]:
    own = Own()
    engine = made(world, Plan(), own, **more)
    own.register(engine)
    train(engine, own, until)
    engine.close()
    return own.all


def assert_like(found: tuple[Any, ...], expected: tuple[Any, ...], rel: float | None = 1e-5) -> None:
    """The same samples, counts and steps, and losses up to `rel`: their sums round otherwise. None: other losses."""
    (ids, best, curve, *rest), (ids_then, best_then, curve_then, *rest_then) = found, expected
    assert (ids, curve[0], rest) == (ids_then, curve_then[0], rest_then)
    if rel is not None:
        assert [best["loss"], *curve] == pytest.approx([best_then["loss"], *curve_then], rel=rel)
        assert best["step"] == best_then["step"]


@contextmanager
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# ---- checkpoints


def _saves(world: World, directory: str, late: bool, plan: dict[str, Any], other: dict[str, Any]) -> tuple[Any, ...]:
    """A save under way holds what the objects were when it began; they are loaded before they are registered, or
    after, under another plan."""
    own = Own()
    engine = made(world, plan_of(plan, directory), own)
    own.register(engine)
    train(engine, own, FAILS)
    disk = "memory" in plan
    with no_warnings():
        engine.save(f"{directory}/saved", wait=disk)
    train(engine, own)
    own.seen.ids.clear()
    engine.close()
    own = Own()
    engine = made(world, plan_of(other, directory), own)
    if not late:
        own.register(engine)
    assert engine.load(f"{directory}/saved") == {}
    if late:
        own.register(engine)
    train(engine, own)
    engine.close()
    return own.all


CHECKPOINTS = {
    "replicas": ({"dp": 2}, {"dp": 2, "zero": 3}),
    "shards": ({"dp": 2, "zero": 3}, {"tp": 2}),
    "stages": ({"pp": 2}, {"dp": 2}),
    "without a flush": ({"pp": 2, "schedule": "2bw"}, {"pp": 2, "schedule": "2bw"}),
    "a disk": ({"dp": 2, "zero": 3, "memory": {"disk": "a directory"}}, {"dp": 2}),
}


@pytest.mark.parametrize("late", [False, True], ids=["first", "late"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.matrix] * (n != "stages")) for n in CHECKPOINTS])
def test_a_checkpoint_has_what_is_registered(tmp_path, name, late):
    plan, other = CHECKPOINTS[name]
    for found in run_ranks(_saves, 2, str(tmp_path), late, plan, other):
        assert_like(found, reference(_undisturbed, 1)[0], None if "schedule" in plan else 1e-5)


def _fails_to_save(world: World, directory: str) -> tuple[Any, ...]:
    """A save that fails on one rank leaves the objects as they are; the next one has them."""
    own = Own()
    engine = made(world, Plan(dp=2), own)
    own.register(engine)
    train(engine, own, 2)
    full = OSError(errno.ENOSPC, "no space left")
    with patch.object(checkpoint.save, "_write", side_effect=full) if world.rank else nullcontext():
        engine.save(directory, wait=False)
        own.after(*_step(engine))
        with pytest.raises(CheckpointError, match="no space left"):
            engine.save(directory)
    engine.save(directory)
    engine.close()
    own = Own()
    engine = made(world, Plan(dp=2), own)
    own.register(engine)
    engine.load(directory)
    train(engine, own)
    return own.all


def _dies_in_a_save(world: World, directory: str) -> tuple[Any, ...]:
    """Rank 1 of three ends as it writes its part of a checkpoint; the others notice it there and go on."""
    own = Own()
    engine = made(World(world.rank, 3, seat=Seat(world.rank, 3), store=world._given), Plan(dp=3), own)
    own.register(engine)
    train(engine, own, FAILS)
    dies = patch.object(checkpoint.save, "_write", lambda *_: die()) if world.rank == 1 else nullcontext()
    with dies, pytest.raises(LaunchError, match=r"a save cannot be completed: .*(1 has ended|has closed its groups)"):
        engine.save(directory)
    engine.regroup(Plan(dp=2), engine.world.without([1]))
    engine.save(directory)
    train(engine, own)
    engine.close()
    return own.all


def test_a_rank_that_dies_is_noticed_in_a_save(tmp_path):
    with disposable_ranks(_dies_in_a_save, 3, str(tmp_path)) as ranks:
        answers = [ranks[rank].result(timeout=30) for rank in (0, 2)]
    for found in answers:
        assert_like(found, reference(_undisturbed, 1)[0])


def _step(engine: Engine) -> tuple[Any, float]:
    batch = next(engine.batches(DATA))
    return batch, engine.step(batch).loss


def test_a_failed_save_costs_nothing(tmp_path):
    for found in run_ranks(_fails_to_save, 2, str(tmp_path)):
        assert_like(found, reference(_undisturbed, 1)[0])


# ---- other plans and other ranks


def _replans(world: World, old: dict[str, Any], new: dict[str, Any]) -> tuple[Any, ...] | None:
    own, sizes = Own(), list[tuple[int, int]]()
    engine = made(world, Plan(**old), own)
    own.register(engine)
    assert engine.on_resize(lambda old, new: sizes.append((old.size, new.size))) is not None
    train(engine, own, FAILS)
    own.seen.ids = {0: (world.rank,), **own.seen.ids} if world.rank == 0 else {}  # the first rank's counts
    fewer = Plan(**new).size
    left = engine.world.among(list(range(1, fewer + 1)) if fewer < world.size else list(range(world.size)))
    if left is None:
        engine.leave()
        return None
    engine.replan(Plan(**new), world=left)
    assert sizes == [(world.size, fewer)] and engine.world.size == fewer
    train(engine, own)
    engine.close()
    return own.all


CHANGES = {
    "fewer ranks": ({"dp": 3}, {"dp": 2}),
    "the same ranks": ({"dp": 2}, {"tp": 2}),
    "out of stages": ({"pp": 2}, {"dp": 2, "zero": 3}),
    "into stages": ({"dp": 3, "zero": 2}, {"pp": 2}),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.matrix] * (n != "fewer ranks")) for n in CHANGES])
def test_another_plan_takes_the_objects_along(name):
    old, new = CHANGES[name]
    answers = [found for found in run_ranks(_replans, Plan(**old).size, old, new) if found is not None]
    assert len(answers) == Plan(**new).size
    for found in answers:
        assert_like(found, reference(_undisturbed, 1)[0])


@dataclass(frozen=True)
class Failure:
    """Ranks of plan `old` that die in step FAILS, or live and raise there; `joins`: further ranks afterwards."""

    old: dict[str, Any]
    new: dict[str, Any]
    dead: dict[int, str]
    fails: dict[int, str] = field(default_factory=dict)
    joins: int = 0
    microbatches: int = 0


def _trains(world: World, row: Failure) -> tuple[Any, ...]:
    own, size = Own(), Plan(**row.old).size
    left = [rank for rank in range(size + row.joins) if rank not in row.dead]
    new = Plan(**row.new)
    if world.rank >= size:
        engine = made(again(world, left.index(world.rank), len(left)), new, own, joins=True)
        own.register(engine)
        if (last := engine.made) is not None:
            ids = Cursor(len(DATA), GLOBAL_BATCH, engine.seed).ids(last.step)
            own.after(SimpleNamespace(step=last.step, ids=tuple(ids.tolist())), last.loss)
    else:
        engine = made(World(world.rank, size, seat=Seat(world.rank, size), store=world._given), Plan(**row.old), own)
        own.register(engine)
        with ExitStack() as stack:
            for ranks, what in ((row.dead, die), (row.fails, fail)):
                if (where := ranks.get(world.rank)) is not None:
                    stack.enter_context(at(where, what, lambda: engine.step_index == FAILS))
            with pytest.raises(LaunchError):
                train(engine, own)
        if row.fails.get(world.rank) == "before the ballot":
            assert own.began["steps"][-1] == FAILS, "the step that is undone has changed them"
        joined = again(world, left.index(world.rank), len(left)) if row.joins else None
        sizes = list[tuple[int, int]]()
        engine.on_resize(lambda old, new: sizes.append((old.size, new.size)))
        cut_short = engine.regroup(new, joined or engine.world.without(list(row.dead)))
        if cut_short is not None:  # the step was committed
            own.after(own.batch, cut_short.loss)
        assert sizes == [(size, len(left))]
    train(engine, own)
    engine.close()
    return own.all


FAILURES = {
    "a step undone": Failure({"dp": 3}, {"dp": 2}, {1: "backward"}, {0: "before the ballot"}),
    "the first rank": Failure({"dp": 3}, {"dp": 2}, {0: "before the ballot"}),
    "another joins": Failure({"dp": 2}, {"dp": 2}, {0: "backward"}, joins=1),
    "in its update": Failure({"dp": 3}, {"dp": 2}, {1: "after its update"}, {0: "in its update"}),
    "shards": Failure({"dp": 4, "shard": 2, "zero": 3}, {"dp": 3, "zero": 1}, {1: "backward"}),
    "stages": Failure({"dp": 2, "pp": 2}, {"dp": 3}, {0: "before the ballot"}),
    "some have dealt with the last step": Failure({"dp": 4, "shard": 2, "zero": 1}, {"dp": 3}, {1: "after its update"}),
    "one is behind, and the others have not dealt with it": Failure(
        {"dp": 3, "zero": 3, "buddy": 2}, {"dp": 2, "zero": 1}, {2: "after its update"}, {0: "after the ballot"}
    ),
    "another joins after a step that nobody has dealt with": Failure(
        {"dp": 2, "zero": 3, "buddy": 2}, {"dp": 2}, {1: "after its update"}, joins=1
    ),
    "buddies, another joins": Failure(
        {"dp": 2, "zero": 3, "buddy": 2}, {"dp": 2, "zero": 3, "buddy": 2}, {1: "before the ballot"}, joins=1
    ),
    "buddies, a step undone": Failure(
        {"dp": 3, "zero": 3, "buddy": 2}, {"dp": 2, "zero": 1}, {1: "backward"}, {0: "before the ballot"}
    ),
    "buddies": Failure({"dp": 3, "zero": 3, "buddy": 2}, {"dp": 2, "zero": 1}, {1: "after the ballot"}),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.matrix] * (n == "shards" or n == "stages" or "buddies" in n))
        for n in FAILURES
    ],
)
def test_a_step_that_is_undone_takes_the_objects_back(name):
    row = FAILURES[name]
    with disposable_ranks(_trains, Plan(**row.old).size + row.joins, row) as ranks:
        answers = [rank.result(timeout=30) for number, rank in enumerate(ranks) if number not in row.dead]
    for found in answers:
        assert_like(found, reference(_undisturbed, 1)[0])


def _one_after_the_other(world: World) -> tuple[Any, ...]:
    """Of four ranks one dies, two have not made its last step, and the one that has dies while it hands it over."""
    own = Own()
    engine = made(World(world.rank, 4, seat=Seat(world.rank, 4), store=world._given), Plan(dp=4), own)
    own.register(engine)
    where, what = ("after its update", die) if world.rank == 3 else ("after the ballot", fail)
    with at(where, what, lambda: engine.step_index == FAILS and world.rank != 1), pytest.raises(LaunchError):
        train(engine, own)
    dies = patch.object(Handover, "finish", lambda _: die()) if world.rank == 1 else nullcontext()
    with dies, pytest.raises(LaunchError):
        engine.regroup(Plan(dp=3), again(world, world.rank, 3, "first"))
    assert engine.regroup(Plan(dp=2), again(world, world.rank // 2, 2)) is None and engine.step_index == FAILS
    train(engine, own)
    engine.close()
    return own.all


def test_objects_stay_where_ranks_do_not_go_on():
    with disposable_ranks(_one_after_the_other, 4) as ranks:
        answers = [ranks[rank].result(timeout=30) for rank in (0, 2)]
    for found in answers:
        assert_like(found, reference(_undisturbed, 1)[0])


def _loops(world: World, dies: bool, fp16: bool) -> tuple[Any, ...]:
    """A loop of the caller's with two microbatches a step, cut short between them on rank 0."""
    size = 3
    own, seen = Own(), list[int]()
    world = World(world.rank, size, seat=Seat(world.rank, size), store=world._given)
    precision = {"name": "fp16", "initial_scale_power": 8} if fp16 else "fp32"
    engine = made(world, Plan(dp=size), own, precision=precision)
    own.register(engine)
    sums = [torch.zeros(1), torch.zeros(1)]
    engine.state("sums", {"rows": sums})

    def step(loop: Any, of: int) -> None:
        engine.commit()  # the objects change before the first forward
        for number in range(2):
            row = DATA[(engine.step_index * 6 + of * 2 + number) % len(DATA)]["input_ids"]
            own.began["forwards"] += 1
            sums[number] += engine.step_index
            loop.backward(loop(row[None]).float().square().mean())
            if dies and engine.step_index == FAILS and number == 0 and engine.world.size == size:
                if world.rank == 1:
                    die()
                raise LaunchError("as if another rank had gone")
        loop.step()
        seen.append(engine.step_index)

    try:
        loop = engine.loop(2)
        while engine.step_index < STEPS:
            step(loop, engine.world.rank)
    except LaunchError:
        assert own.began["forwards"].tolist() == [2 * FAILS + 1] * 2
        engine.regroup(Plan(dp=2), engine.world.without([1]))
        assert own.began["forwards"].tolist() == [2 * FAILS] * 2 and engine.step_index == FAILS
        with pytest.raises(UserError, match=r"call engine\.loop"):
            loop(DATA[0])
        loop = engine.loop(2)
        while engine.step_index < STEPS:
            step(loop, engine.world.rank)
    engine.close()
    return own.began["forwards"].tolist(), [float(each) for each in sums], seen


@pytest.mark.parametrize("fp16", [False, True])
def test_an_accumulation_that_is_undone_takes_the_objects_back(fp16):
    with disposable_ranks(_loops, 3, True, fp16) as ranks:
        answers = [ranks[rank].result(timeout=30) for rank in (0, 2)]
    expected = ([2 * STEPS] * 2, [float(sum(range(STEPS)))] * 2, list(range(1, STEPS + 1)))
    assert answers == [expected] * 2


def _skips(world: World) -> tuple[Any, ...]:
    """A step that overflows counts, and the objects keep what it has changed; one that is not finite, without a scale,
    is put back by `restore`."""
    own, skipped = Own(), list[bool]()
    engine = made(world, Plan(dp=2), own, precision={"name": "fp16", "initial_scale_power": 24, "hysteresis": 1})
    own.register(engine)
    for batch in engine.batches(DATA, steps=2):
        skipped.append(engine.step(batch).skipped)
    assert own.began["steps"] == [0, 1] and engine.step_index == 2
    engine.close()
    return tuple(skipped)


def test_a_step_that_is_skipped_counts():
    assert {skipped[0] for skipped in run_ranks(_skips, 2)} == {True}


def _breaks(world: World) -> list[list[int]]:
    own = Own()
    engine = made(world, Plan(dp=2), own)
    own.register(engine)
    train(engine, own, 2)
    batch = next(engine.batches(DATA))
    broken = replace(batch, load=lambda ids: {**batch.load(ids), "factor": torch.full([len(ids)], torch.nan)})
    found = []
    with pytest.raises(TrainingError):
        engine.step(broken)
    found.append(list(own.began["steps"]))
    engine.restore()
    found.append(list(own.began["steps"]))
    own.began["steps"].append(100)
    engine.commit()
    own.began["steps"].append(101)
    engine.restore()
    engine.restore()
    found.append(list(own.began["steps"]))
    own.after(batch, engine.step(batch).loss)
    engine.close()
    return [*found, list(own.began["steps"])]


def test_commit_and_restore():
    for found in run_ranks(_breaks, 2):
        assert found == [[0, 1, 2], [0, 1], [0, 1, 100], [0, 1, 100, 2]]


def _without_a_flush(world: World) -> tuple[str, list[int]]:
    own = Own()
    engine = made(world, Plan(pp=2, schedule="2bw"), own)
    own.register(engine)
    train(engine, own, 2)
    if world.rank:
        return "", []
    with pytest.raises(CheckpointError) as error:
        engine.regroup(Plan(), engine.world.without([1]))
    return str(error.value), sorted(own.seen.ids)


def test_where_ranks_cannot_go_on_the_objects_stay():
    message, steps = run_ranks(_without_a_flush, 2)[0]
    assert "updates are always under way" in message and steps == [0, 1]


def _wrong(world: World, directory: str) -> None:
    engine, own = made(world, Plan(dp=2), Own()), Own()
    for name, thing, said in (
        ("", {}, "give a name"),
        ("a/b", {}, "without a slash"),
        ("n", 3, r"engine.state\('n'\) got a int: .*\{\"best\": 0.5\}"),
        ("n", {"x": object()}, r"engine.state\('n'\): a value of type builtins.object \(at \['x'\]\)"),
    ):
        with pytest.raises(UserError, match=said):
            engine.state(name, thing)
    own.register(engine)
    own.register(engine)
    with pytest.raises(UserError, match=r"engine.state\('seen'\): another object"):
        engine.state("seen", Seen())
    train(engine, own, 1)
    own.curve += world.rank
    said = r"engine.state\('curve'\) is not the same on ranks 0 and 1"
    with pytest.warns(UserWarning, match=said) if world.rank == 0 else no_warnings():
        engine.save(directory)
    other, mine = made(world, Plan(dp=2), Own()), Own()
    mine.register(other)
    other.state("later", later := {"kept": 1})
    with pytest.warns(UserWarning, match=r"has no engine.state\('later'\)") if world.rank == 0 else no_warnings():
        other.load(directory)
    assert later == {"kept": 1} and mine.curve.tolist() == (own.curve - world.rank).tolist()
    late = made(world, Plan(dp=2), Own())
    late.load(directory)
    train(late, Own(), 2)
    with pytest.raises(UserError, match="came with step 1, and the run is at step 2"):
        late.state("best", Best())


def test_what_is_wrong_is_said(tmp_path):
    run_ranks(_wrong, 2, str(tmp_path))


def _from_a_disk(world: World, directory: str) -> tuple[bool, bool]:
    plan, found = Plan(dp=2, zero=3, memory={"disk": f"{directory}/disk"}), []
    for registers in (False, False, True):
        own = Own()
        engine = made(world, plan, own)
        engine.run = "one"
        if registers:
            own.register(engine)
        found.append(engine.recover())
        for batch in engine.batches(DATA, steps=2):
            engine.step(batch)
        engine.close()
    return tuple(found[1:])


def test_a_disk_that_has_no_objects_is_not_gone_on_from(tmp_path):
    assert run_ranks(_from_a_disk, 2, str(tmp_path)) == [(True, False)] * 2


class Counting(torch.nn.Module):
    """Counts its forwards in a dict: its extra state, or that of an engine."""

    def __init__(self, counts: dict[str, int]) -> None:
        super().__init__()
        self.linear, self.counts = torch.nn.Linear(3, 1), counts

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        self.counts["forwards"] += 1
        return self.linear(row)

    def get_extra_state(self) -> dict[str, int]:
        return self.counts

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.counts.update(state)


def test_extra_state_of_a_module_is_said_to_be_in_no_checkpoint_and_engine_state_keeps_it(tmp_path):
    def counted(counts: dict[str, int]) -> Engine:
        def loss(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
            return model(batch["row"]).square().sum(), len(batch["row"])

        world = World.single()
        with pytest.warns(UserWarning, match=r"1 \(Counting\) has extra state .* no checkpoint has: .* engine\.state"):
            model = torch.nn.Sequential(torch.nn.Linear(3, 3), Counting(counts))
            engine = Engine(model, loss, lambda groups: torch.optim.SGD(groups, 0.1), global_batch=2, world=world)
        engine.state("counts", counts)
        return engine

    data = [{"row": torch.ones(3)} for _ in range(4)]
    first, second = counted({"forwards": 0}), counted(found := {"forwards": 0})
    for batch in first.batches(data, steps=2):
        first.step(batch)
    first.save(tmp_path)
    second.load(tmp_path)
    assert found == {"forwards": 2}
    first.close(), second.close()
