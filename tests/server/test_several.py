"""Several servers of a job: a first one that decides, and followers that do what it says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal import Engine, Plan
from shoal.comm import World
from shoal.errors import CheckpointError, UserError
from shoal.launch.tf_config import local_cluster
from shoal.server import Async, Batch, BoundedStaleness, Client, ParameterServer, Sync, connect
from shoal.server.follower import Follower
from shoal.server.held import Held, named
from shoal.server.keeping import Dealt, Keeping
from shoal.server.link import About
from shoal.server.messages import Begin
from shoal.server.part import Part
from shoal.server.served_table import ServedTable
from shoal.server.shares import Share, balanced
from shoal.server.spread import Followers, Spread
from shoal.server.tickets import Tickets
from shoal.server.weights import Weights
from tests.server.common import SGD, gradients, model, same, together

SECRET = "a secret of these tests"
CLIENTS = 2
ADAGRAD = partial(torch.optim.Adagrad, lr=0.1)
FRESH = Begin("one", 0, "", True)


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("SHOAL_SECRET", SECRET)


class Unwatched:
    def pushed(self, push, outcome): ...
    def evaluated(self, version, found): ...
    def saved(self, version, seconds): ...
    def failed(self, error):
        raise error


def engine_of(index: int, count: int) -> Engine:
    whole = model()
    names = balanced({name: each.nbytes for name, each in named(whole).items()}, count)[index]
    return Engine(
        Held(whole, names, index == 0),
        lambda m, batch: None,
        SGD,
        Plan(),
        global_batch=1,
        microbatch=1,
        world=World.single(),
    )


@dataclass
class Servers:
    """Servers of a job that keep what they have in `folder`. `clip`: the largest norm."""

    folder: Path
    policy: object
    count: int = 2
    clip: float | None = 0.5
    save_every: int = 1000
    codec: str = "fp32"
    table: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.addresses = local_cluster({"ps": self.count})["ps"]
        self.running: dict[int, ParameterServer] = {}

    def start(self, index: int, begin: Begin | None = None) -> None:
        engine = engine_of(index, self.count)
        folder = self.folder / "parts" / str(index)
        share = Share(index, self.count)
        tables = [] if self.table is None else [ServedTable("t", self.table, ADAGRAD, share)]
        if index:
            weights = Weights(engine, self.codec, tables=tables)
            part = Follower(weights, folder, False, "" if begin is None else begin.line)
        else:
            assert begin is not None
            saved = {}
            if begin.source:
                saved = engine.load(begin.source)
                for table in tables:
                    table.load(Path(begin.source))
            parts = [self.folder / "parts" / str(each) for each in range(self.count)]
            followers = Followers(self.addresses[1:], CLIENTS, 30.0, begin)
            weights = Spread(engine, self.codec, self.clip, 3, dict, followers, parts, tables)
            dealt = Dealt(Tickets(None, 1, False, None), Unwatched(), engine.step_index, saved)
            keeping = Keeping(self.folder / "all", self.save_every, False, 5.0, self.folder / "parts")
            part = Part(weights, self.policy, keeping, dealt)
            weights.check()
        self.running[index] = ParameterServer.of(part, self.addresses[index], None, say=lambda line: None)

    def start_all(self, begin: Begin) -> None:
        for index in range(1, self.count):
            self.start(index, begin)
        self.start(0, begin)

    def kill(self, index: int) -> None:
        """Ends a server without telling anybody: nothing is written that was not there before."""
        server = self.running.pop(index)
        server._listener.close()
        part = server._parts[""]
        part._journal.close()
        if index == 0:
            for link in part.values._followers._links:
                link._drop()

    def close(self) -> None:
        for index in sorted(self.running):
            self.running.pop(index).close()


@contextmanager
def servers(folder: Path, policy: object, begin: Begin = FRESH, **more) -> Iterator[Servers]:
    found = Servers(folder, policy, **more)
    found.start_all(begin)
    try:
        yield found
    finally:
        found.close()


def client(of: Servers, rank: int = 0) -> Client:
    return connect(of.addresses, SECRET, rank=rank, timeout=30.0)


def push(worker: Client, mine: nn.Module, rank: int, ticket: int) -> None:
    version = worker.pull_work(dict(mine.named_parameters()))
    gradients(mine, rank, ticket)
    worker.push_work({name: each.grad for name, each in mine.named_parameters()}, version, About(1.0, ticket))


def alone(tickets: int, batch: int = 1, clip: float | None = 0.5) -> nn.Module:
    """The same training in one process."""
    mine = model()
    optimizer = SGD(mine.parameters())
    for first in range(0, tickets, batch):
        total = [torch.zeros_like(each) for each in mine.parameters()]
        for ticket in range(first, first + batch):
            gradients(mine, 0, ticket)
            for into, each in zip(total, mine.parameters(), strict=True):
                into += each.grad / batch
        for into, each in zip(total, mine.parameters(), strict=True):
            each.grad = into
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(mine.parameters(), clip)
        optimizer.step()
    return mine


def close_to(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [2, 3])
def test_the_norm_is_that_of_the_whole_gradient_and_values_are_those_of_one_server(tmp_path, count):
    found = []
    for number in (2, count):
        with servers(tmp_path / f"{number}{len(found)}", Async(), count=number) as some, client(some) as worker:
            mine = model(seed=3)
            for ticket in range(4):
                push(worker, mine, 0, ticket)
            worker.pull_work(dict(mine.named_parameters()))
            found.append(mine)
    close_to(found[0], alone(4))
    assert same(found[0], found[1])


@pytest.mark.parametrize("policy, batch", [(Async(), 1), (Batch(2), 2)])
def test_no_acknowledged_push_is_lost_whichever_server_is_killed(tmp_path, policy, batch):
    """Between pushes, with some that wait for others, before and after checkpoints; also one after the other."""
    with servers(tmp_path, policy, save_every=3) as some, client(some) as worker:
        mine = model(seed=3)
        for ticket, killed in enumerate([[], [1], [0], [], [1, 0], [0, 1], [], [1], [0], []]):
            push(worker, mine, 0, ticket)
            for index in killed:
                some.kill(index)
            for index in sorted(killed, reverse=True):
                newest = max((tmp_path / "all").glob("step-*"))
                some.start(index, Begin("one", int(newest.name[5:]), str(newest), False))
        worker.pull_work(dict(mine.named_parameters()))
        assert some.running[0].version == some.running[1].version == 10 // batch
    close_to(mine, alone(10, batch))


def rows_of(ticket: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some rows of a table of 20 x 3, and their gradients."""
    draw = torch.Generator().manual_seed(ticket)
    rows = torch.randperm(20, generator=draw)[: ticket % 5 + 1].sort().values
    return rows, torch.randn(len(rows), 3, generator=draw)


def push_rows(worker: Client, mine: nn.Module, ticket: int) -> None:
    version = worker.pull_work(dict(mine.named_parameters()))
    gradients(mine, 0, ticket)
    of = {name: each.grad for name, each in mine.named_parameters()}
    worker.push_work(of, version, About(1.0, ticket), rows={"t": rows_of(ticket)})


def with_a_table(tickets: int, table: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    """The same training in one process, clipped by the norm of all."""
    mine, rows = model(), nn.Parameter(table.clone())
    optimizers = [SGD(mine.parameters()), ADAGRAD([rows])]
    for ticket in range(tickets):
        gradients(mine, 0, ticket)
        rows.grad = torch.zeros_like(rows).index_add_(0, *rows_of(ticket))
        torch.nn.utils.clip_grad_norm_([*mine.parameters(), rows], 0.5)
        for optimizer in optimizers:
            optimizer.step()
    return mine, rows.detach()


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.matrix)])
def test_rows_that_were_acknowledged_are_not_lost_whichever_server_is_killed(tmp_path, count):
    """They come with the weights' gradients, are clipped with them, and any number of servers goes on with them."""
    table = torch.randn(20, 3, generator=torch.Generator().manual_seed(5))
    with servers(tmp_path, Async(), save_every=3, table=table, count=count) as some, client(some) as worker:
        mine = model(seed=3)
        for ticket, killed in enumerate([[], [1], [0], [], [1, 0], [0, 1], [], [1], [0], []]):
            push_rows(worker, mine, ticket)
            for index in killed:
                some.kill(index)
            for index in sorted(killed, reverse=True):
                newest = max((tmp_path / "all").glob("step-*"))
                some.start(index, Begin("one", int(newest.name[5:]), str(newest), False))
        expected, rows = with_a_table(10, table)
        worker.pull_work(dict(mine.named_parameters()))
        found, version = worker.pull_rows("t", torch.arange(20))
        assert version == (10,) * count
        torch.testing.assert_close(found, rows, rtol=1e-5, atol=1e-6)
        with pytest.raises(UserError, match="the gradients of t come with those of the weights"):
            worker.push_rows("t", torch.tensor([1]), torch.ones(1, 3), version)
        with pytest.raises(UserError, match="rows 0 to 20 of table 't': it has 0 to 19"):
            worker.pull_rows("t", torch.tensor([0, 20]))
    close_to(mine, expected)
    source = tmp_path / "all/step-00000009"
    begin, expected = Begin("two", 9, str(source), True), with_a_table(9, table)[1]
    with servers(tmp_path / "more", Async(), begin, count=5 - count, table=table) as some, client(some) as worker:
        found, _ = worker.pull_rows("t", torch.arange(20))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_push_that_only_a_follower_has_is_decided_upon_once(tmp_path):
    """A client is killed between its pushes to the two: another one brings the ticket again."""
    with servers(tmp_path, Async()) as some:
        mine = model(seed=3)
        with client(some) as worker:
            version = worker.pull_work(dict(mine.named_parameters()))
            gradients(mine, 0, 0)
            worker._links[1].push({name: each.grad for name, each in mine.named_parameters()}, version, About())
        follower = some.running[1]._parts[""]
        assert len(follower._held) == 1
        with client(some) as worker:
            push(worker, mine, 0, 0)
            worker.pull_work(dict(mine.named_parameters()))
            close_to(mine, alone(1))
            some.running[0]._parts[""].save()
            assert not follower._held and some.running[1].version == 1


def test_any_number_of_servers_and_any_plan_read_the_checkpoint(tmp_path):
    with servers(tmp_path, Async(), save_every=2) as some, client(some) as worker:
        mine = model(seed=3)
        for ticket in range(2):
            push(worker, mine, 0, ticket)
        worker.pull_work(dict(mine.named_parameters()))
    source = tmp_path / "all/step-00000002"
    engine = Engine(model, lambda m, batch: None, SGD, global_batch=2, microbatch=1, world=World.single())
    engine.load(source)
    assert engine.step_index == 2
    assert all(torch.equal(each, engine.parameters[name]) for name, each in mine.named_parameters())
    engine.close()
    begin = Begin("two", 2, str(source), True)
    with servers(tmp_path / "more", Async(), begin, count=3) as some, client(some) as worker:
        push(worker, mine, 0, 2)
        worker.pull_work(dict(mine.named_parameters()))
    close_to(mine, alone(3))


def test_a_follower_that_has_lost_its_folder_says_so(tmp_path):
    some = Servers(tmp_path, Sync(1))
    some.start(1)
    with pytest.raises(UserError, match="nothing of this run is in"):
        some.start(0, Begin("one", 3, "", False))
    some.close()


def test_journals_of_two_runs_are_told_apart(tmp_path):
    with servers(tmp_path, Async()) as some, client(some) as worker:
        push(worker, model(seed=3), 0, 0)
        some.kill(0)
        for each in (tmp_path / "parts").glob("journal-*"):
            each.unlink()
        with pytest.raises(CheckpointError, match="server 1 is at update 1, the first one at 0"):
            some.start(0, Begin("one", 0, str(tmp_path / "all/step-00000000"), False))


def test_what_a_codec_leaves_goes_with_the_next_gradient_also_after_a_server_was_killed(tmp_path):
    found = []
    for killed in (False, True):
        folder = tmp_path / str(killed)
        with servers(folder, Async(), codec="u8") as some, client(some) as worker:
            mine = model(seed=3)
            for ticket in range(6):
                push(worker, mine, 0, ticket)
                if killed and ticket in (1, 3):
                    some.kill(ticket // 3)  # the one and then the other
                    some.start(ticket // 3, Begin("one", 0, str(folder / "all/step-00000000"), False))
            worker.pull_work(dict(mine.named_parameters()))
            found.append(mine)
    assert same(found[0], found[1]) and not same(found[0], alone(6))


def test_staleness_never_exceeds_its_bound_under_a_straggler(tmp_path):
    with servers(tmp_path, BoundedStaleness(2)) as some:

        def work(rank: int, steps: int, pause: float) -> None:
            mine = model(seed=3)
            with client(some, rank) as worker:
                for step in range(steps):
                    push(worker, mine, rank, 100 * rank + step)
                    time.sleep(pause)

        together(partial(work, 0, 4, 0.05), partial(work, 1, 10, 0.01))
        seen = some.running[0].statistics()
        assert max(seen.staleness) == 2 and seen.updates == seen.pushes == 14 == some.running[1].version


@pytest.mark.parametrize("policy, used", [(Async(drop_above=0), 0.0), (Async(scale="inverse"), 0.5)])
def test_a_gradient_that_lags_is_dropped_or_scaled_on_all_servers(tmp_path, policy, used):
    with servers(tmp_path, policy, clip=None) as some, client(some) as worker:
        mine, expected = model(seed=3), model()
        optimizer = SGD(expected.parameters())
        version = worker.pull_work(dict(mine.named_parameters()))
        for ticket, weight in ((0, 1.0), (1, used)):
            gradients(mine, 0, ticket)
            about = About(1.0, ticket)
            taken = worker.push_work({name: each.grad for name, each in mine.named_parameters()}, version, about)
            assert taken.weight == weight
            gradients(expected, 0, ticket)
            optimizer.param_groups[0]["lr"] = 0.1 * weight
            if weight:
                optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
        push(worker, mine, 0, 2)
        gradients(expected, 0, 2)
        optimizer.step()
        worker.pull_work(dict(mine.named_parameters()))
        close_to(mine, expected)
        assert not some.running[1]._parts[""]._held
