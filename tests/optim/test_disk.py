"""plan.memory.disk: masters and optimizer state on a disk between updates. The same bits; crash-safe; clear errors."""

from __future__ import annotations

import copy
import itertools
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from shoal import Engine, Plan
from shoal.checkpoint.whole import whole_state
from shoal.comm.simulation import simulate_world
from shoal.errors import BudgetExceeded, StorageError, UserError
from shoal.models import causal_lm, regression
from shoal.optim.tiers import generations
from shoal.optim.tiers.disk import SECTOR, Disk, Stored, buffer, wait
from tests.exchange import teacher
from tests.parity.cases import text
from tests.pool import RankError, disposable_ranks
from tests.test_memory import EXCHANGE, gpt, train

NADAM = partial(torch.optim.NAdam, lr=3e-3)


def make(path: Path, precision="fp32", optimizer=teacher.ADAMW, exchange=EXCHANGE, **memory) -> Engine:
    plan = Plan(memory={"disk": {"path": str(path)}, **memory}, exchange=exchange)
    return Engine(
        gpt, causal_lm, optimizer, plan, global_batch=12, microbatch=4, precision=precision, clip=0.5, dropout="fused"
    )


def losses(engine: Engine, steps: int) -> list[float]:
    return [engine.step(batch).loss for batch in engine.batches(text(), steps=steps)]


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        ("fp32", teacher.ADAMW),
        ("fp32", partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
        ("bf16", NADAM),
        ({"name": "bf16", "master": "split"}, teacher.ADAMW),
        ({"name": "bf16", "master": "kahan"}, teacher.ADAMW),
        ("fp16", partial(torch.optim.Adagrad, lr=0.01)),
        ("fp32", partial(torch.optim.Muon, lr=0.01)),
    ],
    ids=["fp32-adamw", "fp32-sgd", "bf16-nadam", "bf16-split", "bf16-kahan", "fp16-adagrad", "fp32-muon"],
)
def test_the_same_bits_as_in_memory(tmp_path, precision, optimizer):
    model = gpt
    if optimizer.func is torch.optim.Muon:
        model = matrices
    whole = train(None, {}, precision, model, optimizer)
    ours = train(None, {"disk": str(tmp_path)}, precision, model, optimizer)
    assert ours[:2] == whole[:2]
    assert all(torch.equal(value, whole[2][name]) for name, value in ours[2].items())


def matrices():
    """A GPT of which only matrices learn."""
    model = gpt()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    return model


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_with_several_ranks(tmp_path, zero):
    memory = {"disk": str(tmp_path)}
    whole = simulate_world(2, partial(train, zero=zero), {})
    for ours, theirs in zip(simulate_world(2, partial(train, zero=zero), memory), whole, strict=True):
        assert ours[:2] == theirs[:2]
        assert all(torch.equal(value, theirs[2][name]) for name, value in ours[2].items())


def test_the_host_holds_as_much_as_it_may(tmp_path):
    everything = make(tmp_path, host="1GiB")
    assert everything.parts.pager is None and everything.parts.host.held["optimizer state"] > 0
    needed = everything.parts.host.used
    everything.close()
    with pytest.raises(BudgetExceeded, match="masters, optimizer state") as without:
        train(None, {"host": needed - 1})
    assert without.value.needed == needed and "plan.memory.disk" in str(without.value)
    with pytest.raises(BudgetExceeded) as least:
        make(tmp_path, host=1000)
    whole, pages = train(None, {}), []
    for host in (least.value.needed, (least.value.needed + needed) // 2, needed - 1):
        engine = make(tmp_path, host=host)
        assert losses(engine, 4) == whole[0]
        assert engine.parts.host.most_in_all <= host
        pages.append(len(engine.parts.pager.pages))
        assert engine.parts.pager.bytes_read == 3 * sum(page.moving for page in engine.parts.pager.pages), (
            "not before there is state"
        )
        engine.close()
    assert pages == sorted(pages, reverse=True) and pages[0] > pages[-1] > 0


def test_what_the_host_keeps_of_pages_is_counted(tmp_path):
    engine = make(tmp_path)
    losses(engine, 2)
    assert engine.parts.host.held["optimizer state in turn"] == sum(
        memory.nbytes for memory in engine.parts.pager.buffers
    )
    state = [value for value in engine.optimizer.torch.state.values() if value["exp_avg"].numel() > 1]
    assert state and all(value["exp_avg"].untyped_storage().nbytes() == 4 for value in state), "NaN of one element"
    engine.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16", {"name": "bf16", "master": "split"}, "fp16"])
def test_save_load_and_recover(tmp_path, precision):
    running = make(tmp_path / "disk", precision)
    first = losses(running, 3)
    running.save(tmp_path / "checkpoints")
    first += losses(running, 3)
    running.close()
    recovered = make(tmp_path / "disk", precision)
    assert not recovered.recover(after=6) and recovered.recover(after=5) and recovered.step_index == 6
    later = losses(recovered, 2)
    recovered.close()
    for memory in (None, {"disk": str(tmp_path / "disk")}):
        loaded = Engine(
            gpt, causal_lm, teacher.ADAMW, Plan(memory=memory, exchange=EXCHANGE),
            global_batch=12, microbatch=4, precision=precision, clip=0.5, dropout="fused",
        )  # fmt: skip
        loaded.load(tmp_path / "checkpoints")
        assert losses(loaded, 5) == first[3:] + later
        loaded.close()


def test_who_looks_at_masters_in_between_may_change_them(tmp_path):
    engines = [make(tmp_path / "a", "bf16"), Engine(
        gpt, causal_lm, teacher.ADAMW, Plan(exchange=EXCHANGE), global_batch=12, microbatch=4, precision="bf16",
        clip=0.5, dropout="fused",
    )]  # fmt: skip
    seen = []
    for engine in engines:
        before = losses(engine, 2)
        with torch.no_grad():
            for parameter in engine.optimizer.parameters.values():
                parameter.mul_(0.5)
        seen.append(before + losses(engine, 3))
        engine.close()
    assert seen[0] == seen[1]


def test_a_state_that_was_loaded_is_seen_before_the_next_update(tmp_path):
    """It was what lay on the disk, zeros in a new run."""
    running = make(tmp_path / "a")
    losses(running, 2)
    state = running.optimizer.state_dict()
    running.close()
    other = make(tmp_path / "b")
    other.optimizer.torch.load_state_dict(copy.deepcopy(state))
    for _ in range(2):
        for number, values in other.optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, state["state"][number][key]) for key, value in values.items())
        other.save(tmp_path / "saved")
        other.load(tmp_path / "saved")
    other.close()


def test_another_plan_or_model_recovers_nothing(tmp_path):
    running = make(tmp_path)
    losses(running, 2)
    running.close()
    other = make(tmp_path, "bf16")
    assert not other.recover()
    other.close()


def dies_at(number: int, function):
    """`function`, at whose call `number` the process is killed."""
    count = itertools.count(1)

    def call(*args):
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)

    return call


def killed(child, *args) -> None:
    """Calls `child` in a process, which is killed before it returns."""
    with disposable_ranks(child, 1, *args) as (rank,), pytest.raises(RankError, match="killed by SIGKILL"):
        rank.result()


def dies_in_an_update(world, path: Path, where: str, number: int, precision: str) -> None:
    if where == "write":
        Stored._write = dies_at(number, Stored._write)
    else:
        generations.os.replace = dies_at(number, os.replace)
    losses(make(path, precision), 5)


@pytest.mark.parametrize(
    ("where", "number", "precision"),
    [
        ("write", 20, "fp32"),
        ("write", 45, "bf16"),
        ("write", 35, "fp32"),
        ("replace", 1, "bf16"),
        ("replace", 3, "fp32"),
    ],
)
def test_killed_in_the_middle_of_an_update(tmp_path, where, number, precision):
    whole = train(None, {}, precision)[0]
    killed(dies_in_an_update, tmp_path, where, number, precision)
    engine = make(tmp_path, precision)
    recovered = engine.recover()
    assert recovered == (where == "write" or number > 1)
    assert engine.step_index < 4
    start = engine.step_index
    assert losses(engine, 4 - start) == whole[start:]
    assert start > 0 or not recovered
    engine.close()


def dies_in_its_first_write(world, path: Path, checkpoints: Path | None) -> None:
    engine = make(path)
    if checkpoints is not None:
        losses(engine, 2)
        engine.save(checkpoints)
        losses(engine, 3)
        engine.load(checkpoints)
    Stored._write = dies_at(7, Stored._write)
    losses(engine, 1)


@pytest.mark.parametrize("loads", [True, False], ids=["load", "fresh start"])
def test_what_an_older_record_says_is_withdrawn_before_its_files_are_written(tmp_path, loads):
    """After a load in mid-run, and where a run begins anew on a path of an old one, the older record is the only
    one."""
    disk = tmp_path / "disk"
    if not loads:
        engine = make(disk)
        losses(engine, 3)
        engine.close()
    killed(dies_in_its_first_write, disk, tmp_path / "checkpoints" if loads else None)
    engine = make(disk)
    assert not engine.recover()
    engine.close()


def test_only_the_same_run_of_the_same_shapes_goes_on(tmp_path):
    def mlp(width: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(teacher.INPUTS, width), torch.nn.Linear(width, teacher.OUTPUTS))

    def engine(width: int) -> Engine:
        plan = Plan(memory={"disk": str(tmp_path)})
        return Engine(partial(mlp, width), regression, teacher.ADAMW, plan, global_batch=16, precision="bf16")

    first = engine(24)
    first.run = "one"
    for batch in first.batches(teacher.data(), steps=2):
        first.step(batch)
    first.close()
    for width, run, goes_on in ((32, "one", False), (24, "other", False), (24, "one", True)):
        again = engine(width)
        again.run = run
        assert again.recover() is goes_on
        again.close()


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    "other", [{"host": True}, {"exchange": {**EXCHANGE, "chunk_bytes": 5000}}], ids=["one copy", "smaller pages"]
)
def test_a_record_goes_before_another_plan_changes_its_files(tmp_path, other, steps):
    """Or its own plan would go on from what they hold then."""
    first = make(tmp_path)
    losses(first, 3)
    first.close()
    if "host" in other:
        everything = make(tmp_path / "aside", host="1GiB")
        other = {"host": everything.parts.host.used - 1}
        everything.close()
    between = make(tmp_path, **other)
    losses(between, steps)
    between.close()
    again = make(tmp_path)
    assert not again.recover()
    again.close()


class Counts(torch.optim.SGD):
    """Keeps a plain number a parameter, which its update depends on."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"] / state["count"])


@pytest.mark.parametrize("update", ["at once", "deferred"])
def test_plain_numbers_of_the_optimizer_are_those_of_the_update(tmp_path, update):
    optimizer = partial(Counts, lr=0.1)
    engine = make(tmp_path, "bf16", optimizer, update=update)
    losses(engine, 3)
    engine.close()
    again = make(tmp_path, "bf16", optimizer, update=update)
    assert again.recover()
    assert losses(again, 3) == train(None, {}, "bf16", optimizer=optimizer, steps=6)[0][3:]
    assert {values["count"] for values in again.optimizer.torch.state.values()} == {6}
    again.close()


@pytest.mark.parametrize("memory", [{"device": "1GiB"}, {"update": "deferred"}, {"disk": True}], ids=str)
def test_a_rank_may_own_nothing(tmp_path, memory):
    """Whole matrices of which there are fewer than ranks."""
    model = lambda: torch.nn.Sequential(torch.nn.Linear(teacher.INPUTS, teacher.OUTPUTS, bias=False))  # noqa: E731

    def run(world, memory) -> list[float]:
        memory = {"disk": str(tmp_path)} if memory and "disk" in memory else memory
        plan, muon = Plan(dp=2, zero=1, memory=memory), partial(torch.optim.Muon, lr=0.02)
        engine = Engine(model, regression, muon, plan, global_batch=16, microbatch=8, world=world, dropout="fused")
        try:
            return [engine.step(batch).loss for batch in engine.batches(teacher.data(), steps=3)]
        finally:
            engine.close()

    assert simulate_world(2, run, memory) == simulate_world(2, run, None)


@pytest.mark.parametrize("update", ["at once", "deferred"])
def test_rows_of_a_sparse_embedding_beside_pages(tmp_path, update):
    def model() -> torch.nn.Module:
        made = gpt()
        made.position_embedding.sparse = True
        return made

    whole = train(None, {}, "bf16", model)
    ours = train(None, {"disk": str(tmp_path), "update": update}, "bf16", model)
    assert ours[:2] == whole[:2]


def test_reading_weights_brings_no_page_into_memory(tmp_path):
    engine = make(tmp_path / "disk", "bf16")
    losses(engine, 2)
    engine.export(tmp_path / "out")
    whole_state(engine.module, engine.parts.chunks)
    assert not any(page.is_open for page in engine.parts.pager.pages)
    engine.close()


def test_a_full_disk_is_found_before_training(tmp_path):
    with pytest.raises(StorageError, match=r"plan\.memory\.disk\.size = 10,000 bytes for a rank: [0-9,]+ are needed"):
        make(tmp_path, disk={"path": str(tmp_path), "size": 10_000})
    script = (
        f"mount -t tmpfs -o size=64k tmpfs {tmp_path} && {sys.executable} -c '"
        f'from tests.optim.test_disk import make; make("{tmp_path}")\''
    )
    child = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "No space left on device" in child.stderr and "bytes are needed there" in child.stderr, child.stderr


def test_a_file_that_was_cut_is_named(tmp_path):
    engine = make(tmp_path)
    losses(engine, 2)
    victim = sorted(tmp_path.glob("rank-0/*.[ab]"))[engine.parts.pager.generation % 2]
    os.truncate(victim, SECTOR)
    with pytest.raises(StorageError, match=f"{victim.name} ends at byte 4,096"):
        losses(engine, 1)
    engine.close()


def test_a_path_has_one_user(tmp_path):
    engine = make(tmp_path)
    with pytest.raises(StorageError, match="in use by another run"):
        make(tmp_path)
    engine.close()
    make(tmp_path).close()


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"disk": 3}, "plan.memory.disk = 3: give a directory, or a table"),
        ({"disk": ""}, "plan.memory.disk = '': give a directory, or a table"),
        ({"disk": {"path": ""}}, "give a directory, or a table"),
        ({"disk": {"size": "1GB"}}, "give a directory, or a table"),
        ({"disk": {"path": "x", "sise": 1}}, 'plan.memory.disk has no key "sise". Did you mean "size"?'),
        ({"host": "lots"}, "plan.memory.host = 'lots': give bytes"),
    ],
)
def test_wrong_tables(memory, message):
    with pytest.raises(UserError) as error:
        train(None, memory)
    assert message in str(error.value)


def test_files_hold_what_was_written(tmp_path):
    disk = Disk(tmp_path)
    size = 3 * 2**22 + SECTOR
    stored = disk.files({"x": size})["x"]
    data, back = buffer(size), buffer(size)
    data.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
    wait(stored.write(data))
    wait(stored.read(back))
    assert torch.equal(back, data) and torch.equal(stored.mapped(), data)
    disk.close()
