"""A parameter server and its clients: what each policy computes, who waits, and what outlives whom."""

from __future__ import annotations

import itertools
import signal
import time
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

from shoal import Engine, Plan
from shoal.comm import World
from shoal.comm.simulation import simulate_world
from shoal.errors import LaunchError, UserError
from shoal.server import Async, Batch, BoundedStaleness, Options, ParameterServer, Share, Sync, Table, connect
from tests.server.common import SGD, TOKEN, client, gradients, model, python, same, serve, together


def train(server, rank: int, steps: int, pause: float = 0.0, **more) -> nn.Module:
    """Pulls and pushes; returns what it has pulled in the end."""
    mine = model(seed=99)
    with client(server, rank=rank, **more) as worker:
        for step in range(steps):
            version = worker.pull(mine)
            gradients(mine, rank, step)
            time.sleep(pause)
            worker.push(mine, version)
        worker.pull(mine)
    return mine


def all_reduced(size: int, steps: int) -> nn.Module:
    """The same training by an all-reduce of gradients."""
    start = model()  # threads share torch's generator

    def run(world: World) -> nn.Module:
        mine = deepcopy(start)
        optimizer = SGD(mine.parameters())
        group = world.group("all", list(range(size)))
        for step in range(steps):
            gradients(mine, world.rank, step)
            for parameter in mine.parameters():
                group.all_reduce(parameter.grad.view(-1), op="avg")
            optimizer.step()
        return mine

    return simulate_world(size, run)[0]


@pytest.mark.parametrize("shared", [True, False])
def test_sync_is_all_reduce_sgd_to_the_bit(shared):
    with serve(Sync(3)) as server:
        models = together(*(partial(train, server, rank, 5, shared=shared) for rank in (2, 0, 1)))
    assert all(same(each, all_reduced(3, 5)) for each in models)
    assert server.statistics().lags == {0: 15} and server.version == 5


def test_batch_updates_once_for_k_pushes_by_their_mean():
    with serve(Batch(2), optimizer=partial(torch.optim.SGD, lr=0.5)) as server, client(server) as worker:
        mine, expected = model(seed=1), model()
        for step in range(4):
            version = worker.pull(mine)
            gradients(mine, 0, step)
            (taken,) = worker.push(mine, version)
            assert taken.version == (step + 1) // 2
        worker.pull(mine)
        with torch.no_grad():
            for first in (0, 2):
                one, two = model(), model()
                gradients(one, 0, first)
                gradients(two, 0, first + 1)
                for p, a, b in zip(expected.parameters(), one.parameters(), two.parameters(), strict=True):
                    p -= 0.5 * (a.grad + b.grad) / 2
        for p, q in zip(mine.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_staleness_never_exceeds_its_bound_under_a_straggler():
    with serve(BoundedStaleness(2)) as server:
        together(partial(train, server, 0, 4, pause=0.05), *(partial(train, server, rank, 8) for rank in (1, 2)))
        seen = server.statistics()
    assert max(seen.staleness) == 2 and seen.updates == seen.pushes == 20


def test_asynchronous_clients_do_not_wait_for_a_straggler():
    with serve(Async()) as server:
        began = time.monotonic()
        together(partial(train, server, 1, 10), partial(train, server, 2, 10))
        assert time.monotonic() - began < 10 and server.version == 20
        assert sum(server.statistics().lags.values()) == 20


def test_who_waits_in_vain_is_told_for_whom():
    with serve(Sync(2)) as server, client(server, rank=4), client(server, rank=7, timeout=0.3) as worker:
        mine = model()
        version = worker.pull(mine)
        gradients(mine, 7, 0)
        worker.push(mine, version)
        with pytest.raises(LaunchError, match=r"client 7 has waited 0\.3 s for client 4: see whether"):
            worker.pull(mine)
    with serve(Sync(2)) as server, client(server, rank=7, timeout=0.3) as worker:
        gradients(mine, 7, 0)
        worker.push(mine, worker.pull(mine))
        with pytest.raises(LaunchError, match=r"client 7 has waited 0\.3 s for more clients"):
            worker.pull(mine)


def test_a_learning_rate_is_divided_by_the_lag():
    sgd = partial(torch.optim.SGD, lr=1.0)
    with serve(Async(scale="inverse"), optimizer=sgd) as server, client(server) as worker:
        mine = {name: torch.ones_like(each) for name, each in model().named_parameters()}
        worker.pull(mine)
        before = {name: each.clone() for name, each in mine.items()}
        ones = {name: torch.ones_like(each) for name, each in mine.items()}
        worker.push(ones, 0)
        (taken,) = worker.push(ones, 0)
        worker.pull(mine)
    assert (taken.lag, taken.weight) == (1, 0.5)
    assert all(torch.allclose(before[name] - 1.5, mine[name], atol=1e-5) for name in mine)


def test_what_does_not_fit_is_refused_and_changes_nothing():
    said: list[str] = []
    with serve(Async(), options=Options(say=said.append)) as server, client(server, rank=0) as worker:
        mine, before = model(seed=1), model()
        with pytest.raises(UserError, match=r"no parameter of the model has a gradient: call backward\(\) after pull"):
            worker.push(mine, worker.pull(mine))
        mine = model(seed=1)
        with pytest.raises(UserError, match="the same model"):
            worker.pull(nn.Linear(3, 3))
        worker.pull(mine)
        gradients(mine, 0, 0)
        mine[0].weight.grad[0, 0] = float("nan")
        with pytest.raises(UserError, match="client 0: a gradient that is not finite"):
            worker.push(mine, 0)
        with pytest.raises(UserError, match="there are 0 to 0"):
            gradients(mine, 0, 0)
            worker.push(mine, 5)
        with pytest.raises(UserError, match="client 0 is connected already"):
            client(server, rank=0)
        with pytest.raises(UserError, match="is not what pull returned"):
            worker.push(mine, None)
        with pytest.raises(UserError, match="the server has no table 'emb': it has none"):
            server.statistics("emb")
        worker.pull(mine)
        assert same(mine, before) and server.version == 0
        worker.close()
        with pytest.raises(UserError, match="has been closed: connect once more"):
            worker.pull(mine)


@pytest.mark.parametrize(
    "policy, more, message",
    [
        ("sync", {}, r"policy = 'sync': give one as it is made, such as shoal\.Sync\(4\)"),
        (Async, {}, "policy = .*Async.*: give one as it is made"),
        (Async(), {"optimizer": SGD(model().parameters())}, "is a ready SGD"),
        (Async(), {"optimizer": "sgd"}, r"give a torch\.optim\.Optimizer class"),
    ],
)
def test_what_is_no_policy_or_makes_no_optimizer_is_refused(policy, more, message):
    with pytest.raises(UserError, match=message):
        serve(policy, **more)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Options(save_every=0), r"Options\(save_every=0\): give a number of updates from 1 on"),
        (lambda: Options(grace=-1.0), r"Options\(grace=-1.0\): give seconds from 0 on"),
        (lambda: Options(grace=float("nan")), r"Options\(grace=nan\): give seconds from 0 on"),
        (lambda: Options(seconds=0), r"Options\(seconds=0\): give seconds above 0"),
        (lambda: Options(seconds="60"), r"Options\(seconds='60'\): give seconds above 0"),
        (lambda: connect("127.0.0.1:1", TOKEN, timeout=float("nan")), r"connect\(timeout=nan\): give seconds above 0"),
        (lambda: Async(drop_above=float("nan")), "drop_above = nan: give a number of updates from 0 on"),
        (lambda: Async(scale="invers"), 'scale = "invers" is not one of none, inverse'),
        (lambda: Share("a", 2), "give a server's number"),
    ],
)
def test_numbers_that_are_none_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize("rows, width", [(0, 4), (-1, 4), (4, 0), (1.5, 4), (float("nan"), 4)])
def test_a_table_has_rows_and_columns(rows, width):
    with pytest.raises(UserError, match="from 1 on"):
        Table(rows, width)


@pytest.mark.parametrize("codec", ["fp16", "u8"])
def test_gradients_travel_encoded(codec):
    with serve(Sync(1), codec=codec) as server:
        coded = train(server, 0, 4)
    with serve(Sync(1)) as server:
        exact = train(server, 0, 4)
    assert not same(coded, exact)
    for one, other in zip(coded.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.05)


@pytest.mark.parametrize("lost", ["dropped", "refused", "of no count", "without gradients of some"])
def test_what_encoding_has_left_waits_where_no_update_is_made(lost):
    """After the first push comes one that changes nothing, and then zeros, with which goes what was left of the
    first."""
    sgd = partial(torch.optim.SGD, lr=1.0)
    with serve(Async(drop_above=0), codec="u4", optimizer=sgd) as server, client(server) as one, client(server) as two:
        mine, theirs = model(), model()
        before = [parameter.detach().clone() for parameter in mine.parameters()]

        def push(worker, into, version, step: int | None = None, count: float = 1.0):
            gradients(into, 0, step or 0)
            for parameter in into.parameters() if step is None else ():
                parameter.grad.zero_()
            return worker.push(into, version, count)[0]

        push(one, mine, one.pull(mine), 1)
        wanted = [value - parameter.grad for value, parameter in zip(before, mine.parameters(), strict=True)]
        version = one.pull(mine)
        if lost == "dropped":
            push(two, theirs, two.pull(theirs))
            assert push(one, mine, version, 2).weight == 0
        elif lost == "refused":
            mine[0].weight.grad.fill_(torch.nan)
            with pytest.raises(UserError, match="not finite"):
                one.push(mine, version)
        elif lost == "of no count":
            push(one, mine, version, 2, count=0.0)
        else:
            mine[0].weight.grad = mine[0].bias.grad = None
            mine[2].weight.grad, mine[2].bias.grad = torch.zeros(3, 7), torch.zeros(3)
            one.push(mine, version)
        for _ in range(8):
            push(one, mine, one.pull(mine))
        one.pull(mine)
        for value, parameter in zip(wanted, mine.parameters(), strict=True):
            torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=1e-5)


def test_several_servers_share_the_parameters_and_compute_the_same():
    servers = [serve(Sync(2), options=Options(share=Share(index, 2))) for index in range(2)]
    try:
        addresses = [server.address for server in servers]

        def run(rank: int) -> nn.Module:
            mine = model(seed=9)
            with connect(addresses, TOKEN, rank=rank, timeout=20.0) as worker:
                for step in range(3):
                    version = worker.pull(mine)
                    assert version == (step, step)
                    gradients(mine, rank, step)
                    worker.push(mine, version)
                worker.pull(mine)
            return mine

        models = together(partial(run, 0), partial(run, 1))
    finally:
        for server in servers:
            server.close()
    assert same(models[0], all_reduced(2, 3)) and same(models[0], models[1])


@pytest.mark.parametrize("optimizer", [SGD, partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1)])
@pytest.mark.parametrize("count", [1, 3])
def test_rows_are_updated_as_a_whole_table_would_be(optimizer, count):
    weight = torch.randn(50, 4)
    table = nn.Parameter(weight.clone())
    reference = optimizer([table])
    options = [Options(tables={"emb": Table.of(weight)}, share=Share(index, count)) for index in range(count)]
    servers = [ParameterServer({}, optimizer, Sync(2), token=TOKEN, options=each) for each in options]
    try:
        addresses = [server.address for server in servers]
        draw = torch.Generator().manual_seed(3)
        with connect(addresses, TOKEN, rank=0) as one, connect(addresses, TOKEN, rank=1) as two:
            for _ in range(3):
                total = torch.zeros_like(table)
                every = torch.arange(50)  # momentum of rows without gradients would move on in a whole table
                for worker in (one, two):
                    rows = torch.cat([every, torch.randint(50, (7,), generator=draw)]).view(3, 19)
                    values, version = worker.pull_rows("emb", rows)
                    torch.testing.assert_close(values, table.detach()[rows])
                    mine = torch.randn(3, 19, 4, generator=draw)
                    total.index_add_(0, rows.view(-1), mine.view(-1, 4))
                    worker.push_rows("emb", rows, mine, version)
                table.grad = total / 2
                reference.step()
            values, _ = one.pull_rows("emb", torch.arange(50))
            torch.testing.assert_close(values, table.detach())
            with pytest.raises(UserError, match="it has 0 to 49"):
                one.pull_rows("emb", torch.tensor([50]))
            with pytest.raises(UserError, match="pull_rows: rows are float32: give whole numbers"):
                one.pull_rows("emb", torch.tensor([1.5]))
            with pytest.raises(UserError, match="push_rows: rows are bool: give whole numbers"):
                one.push_rows("emb", torch.tensor([True]), torch.ones(1, 4), version)
    finally:
        for server in servers:
            server.close()


def test_rows_without_gradients_stay_and_are_not_sent():
    options = Options(tables={"emb": Table(10_000_000, 1)})
    with serve(Async(), options=options) as server, client(server) as worker:
        rows = torch.tensor([3, 9_999_999, 3])
        values, version = worker.pull_rows("emb", rows)
        assert values.tolist() == [[0.0]] * 3
        worker.push_rows("emb", rows, torch.ones(3, 1), version)
        assert worker.pull_rows("emb", torch.tensor([3, 4, 9_999_999]))[0].view(-1).tolist() == pytest.approx(
            [-0.2, 0.0, -0.1]
        )
        mine = model(seed=4)
        worker.push({name: torch.ones_like(each) for name, each in mine.named_parameters()}, worker.pull(mine))


def test_a_server_that_is_started_again_goes_on_to_the_bit(tmp_path):
    """Pushes before the first checkpoint, after one, and one that waits for others: all of them are kept."""
    options = Options(save_every=3, tables={"emb": Table(20, 2)})
    kept = partial(serve, Batch(2), directory=tmp_path, options=options)
    expected, mine = model(seed=1), model(seed=2)
    with serve(Batch(2)) as other, client(other, rank=0) as worker:
        for step in range(11):
            version = worker.pull(expected)
            gradients(expected, 0, step)
            worker.push(expected, version)
        gradients(expected, 0, 11)
        worker.push(expected, worker.pull(expected))
        worker.pull(expected)
    with kept() as server, client(server, rank=0) as worker:
        for step in range(11):
            version = worker.pull(mine)
            gradients(mine, 0, step)
            worker.push(mine, version)
            worker.push_rows("emb", torch.tensor([step]), torch.ones(1, 2), 0)
    with kept() as server, client(server, rank=0) as worker:
        assert server.version == 5
        gradients(mine, 0, 11)
        assert worker.push(mine, 5)[0].version == 6
        worker.pull(mine)
        assert worker.pull_rows("emb", torch.arange(12))[0][:, 0].count_nonzero() == 10  # the 11th waits for another
    assert same(mine, expected)


class Noting(nn.Linear):
    """Has extra state, which is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}


def test_a_model_with_extra_state_is_served():
    given, mine = Noting(3, 2), Noting(3, 2)
    with ParameterServer(given, SGD, Async(), token=TOKEN) as server, client(server) as worker:
        worker.pull(mine)
    assert same(mine, given)


def test_any_plan_reads_a_servers_checkpoint(tmp_path):
    with serve(Async(), directory=tmp_path, options=Options(save_every=2)) as server:
        trained = train(server, 0, 2)

    def load(world: World) -> dict[str, torch.Tensor]:
        plan = Plan(dp=2, zero=1)
        engine = Engine(model, lambda m, batch: None, SGD, plan, global_batch=2, microbatch=1, world=world)
        engine.load(tmp_path / "weights")
        assert engine.step_index == 2
        found = {name: each.detach().clone() for name, each in engine.module.named_parameters()}
        engine.close()
        return found

    found = simulate_world(2, load)[0]
    assert all(torch.equal(value, found[name]) for name, value in trained.named_parameters())


SERVER = """
server = serve(directory=sys.argv[1], address=sys.argv[2])
print(server.address, flush=True)
server.wait()
"""


def kills(tmp_path, times: int, pushes: int) -> None:
    """A server is killed `times` times while a client pushes; each push that was acknowledged is in the weights."""
    server = python(SERVER, str(tmp_path), "127.0.0.1:0")
    address = server.stdout.readline().strip()
    mine, acknowledged = model(seed=5), 0
    with client(address, rank=0, timeout=60.0) as worker:
        for _ in range(times):
            for _ in range(pushes):
                version = worker.pull(mine)
                assert version == acknowledged
                gradients(mine, 0, acknowledged)
                worker.push(mine, version)
                acknowledged += 1
            server.send_signal(signal.SIGKILL)
            server.wait()
            server.stdout.close()
            server = python(SERVER, str(tmp_path), address)
        assert worker.pull(mine) == acknowledged
    server.kill()
    server.wait()
    server.stdout.close()
    expected = model()
    optimizer = SGD(expected.parameters())
    for step in range(acknowledged):
        gradients(expected, 0, step)
        optimizer.step()
    assert same(mine, expected)


def test_no_acknowledged_push_is_lost_when_a_server_is_killed(tmp_path):
    kills(tmp_path, times=1, pushes=4)


@pytest.mark.matrix
def test_no_acknowledged_push_is_lost_when_a_server_is_killed_twenty_times(tmp_path):
    kills(tmp_path, times=20, pushes=5)


CLIENT = """
mine = model(seed=3)
worker = client(sys.argv[1], rank=int(sys.argv[2]), shared=sys.argv[3] == "True")
for step in range(10**9):
    version = worker.pull(mine)
    gradients(mine, 1, step)
    worker.push(mine, version)
    print(step, flush=True)
"""


@pytest.mark.matrix
@pytest.mark.parametrize("shared", [True, False])
def test_clients_that_are_killed_end_only_their_sessions_and_what_they_were_told_is_kept(shared):
    said: list[str] = []
    with serve(Async(), options=Options(say=said.append)) as server, client(server, rank=0) as worker:
        mine, told = model(seed=2), 0
        for _ in range(20):
            victim = python(CLIENT, server.address, "1", str(shared))
            for line in itertools.islice(victim.stdout, 3):
                told += 1
                gradients(mine, 0, int(line))
                worker.push(mine, worker.pull(mine))
            victim.send_signal(signal.SIGKILL)
            told += len(victim.stdout.readlines())
            victim.wait()
            victim.stdout.close()
        assert server.statistics().pushes >= told + 60
        end = time.monotonic() + 5.0
        while sum("client 1 " in line for line in said) < 20:
            assert time.monotonic() < end
            time.sleep(0.05)
