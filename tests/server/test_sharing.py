"""Several servers that keep what they have in one directory, and others that go on from it, however many."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal import Engine
from shoal.comm import World
from shoal.errors import UserError
from shoal.server import Async, Batch, Client, Options, ParameterServer, Share, Table, connect
from tests.server.common import SGD, TOKEN, gradients, model, same

ROWS = 37
ADAGRAD = partial(torch.optim.Adagrad, lr=0.1)


@contextmanager
def servers(directory: Path, count: int, policy: object = None, tables: Mapping[str, Table] | None = None, of=SGD):
    options = [Options(share=Share(index, count), tables=tables or {}, save_every=3) for index in range(count)]
    made = partial(ParameterServer, model(), of, policy or Async(), token=TOKEN, directory=directory)
    running = [made(options=each) for each in options]
    try:
        with connect([each.address for each in running], TOKEN, rank=0, timeout=20.0) as worker:
            yield worker
    finally:
        for each in running:
            each.close()


def train(worker: Client, mine: nn.Module, steps: range) -> None:
    for step in steps:
        version = worker.pull(mine)
        gradients(mine, 0, step)
        worker.push(mine, version)
    worker.pull(mine)


def alone(steps: int) -> nn.Module:
    mine = model()
    optimizer = SGD(mine.parameters())
    for step in range(steps):
        gradients(mine, 0, step)
        optimizer.step()
    return mine


def test_any_number_of_servers_and_any_plan_go_on_with_the_weights(tmp_path):
    mine, done = model(seed=4), 0
    for count in (2, 3, 1, 2):
        with servers(tmp_path, count) as worker:
            train(worker, mine, range(done, done + 2))
        done += 2
        assert same(mine, alone(done))
        engine = Engine(model, lambda m, batch: None, SGD, global_batch=1, microbatch=1, world=World.single())
        engine.load(tmp_path / "weights")
        assert engine.step_index == done
        assert all(torch.equal(each, engine.parameters[name]) for name, each in mine.named_parameters())
        assert all(bool(each["momentum_buffer"].any()) for each in engine.optimizer.torch.state.values())
        engine.close()


@pytest.mark.parametrize(
    "optimizer", [ADAGRAD, pytest.param(SGD, marks=pytest.mark.matrix), partial(torch.optim.Adam, lr=0.1)]
)
def test_any_number_of_servers_go_on_with_rows(tmp_path, optimizer):
    every, weight = torch.arange(ROWS), torch.randn(ROWS, 3)
    tables = {"emb": Table.of(weight)}
    reference = nn.Parameter(weight.clone())
    expected = optimizer([reference])
    for number, count in enumerate((2, 3, 1, 3)):
        with servers(tmp_path, count, tables=tables, of=optimizer) as worker:
            for step in range(2):
                gradient = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(10 * number + step))
                _, version = worker.pull_rows("emb", every)
                worker.push_rows("emb", every, gradient, version)
                reference.grad = gradient
                expected.step()
            torch.testing.assert_close(worker.pull_rows("emb", every)[0], reference.detach())


def test_what_a_server_that_was_killed_has_left_of_a_checkpoint_stops_no_later_one(tmp_path):
    mine = model(seed=4)
    with servers(tmp_path, 2) as worker:
        train(worker, mine, range(6))
        whole = tmp_path / "weights"
        for step in (3, 4):  # in the middle of the save that follows a replay, and of one that never came
            left = whole / f"step-{step:08d}.tmp"
            left.mkdir()
            (left / "__0_0.distcp").write_bytes(b"cut off")
        train(worker, mine, range(6, 15))
    assert sorted(each.name for each in whole.iterdir()) == ["step-00000012", "step-00000015"]


def test_gradients_that_no_checkpoint_of_all_has_are_not_passed_over(tmp_path):
    mine = model(seed=4)
    with servers(tmp_path, 2, Batch(2)) as worker:
        train(worker, mine, range(1))
    said = r"2 servers have kept weights in .* start these 2 again and close them"
    with pytest.raises(UserError, match=said), servers(tmp_path, 3, Batch(2)):
        pass
    with servers(tmp_path, 2, Batch(2)) as worker:
        train(worker, mine, range(1, 2))
    with servers(tmp_path, 3, Batch(2)) as worker:
        assert worker.pull(mine) == (1, 1, 1)


def test_a_server_whose_folder_is_gone_says_so(tmp_path):
    with servers(tmp_path, 2) as worker:
        train(worker, model(), range(1))
    (tmp_path / "weights-1-of-2").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="weights-1-of-2 is missing: bring it back"), servers(tmp_path, 2):
        pass
